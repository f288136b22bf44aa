"""What layers of static caches do with new keys and values: those of transformers 5.22.2, cache_utils.py.

They are patterns that the methods of the installed release are compared with, and are not called.
"""

import torch


def update(self, key_states, value_states, *args, **kwargs):
    """Do what ``StaticLayer.update`` does: write them behind those that there are."""
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)

    kv_length = key_states.shape[-2]
    cache_position = torch.arange(kv_length, device=self.device) + self.cumulative_length
    self.cumulative_length.add_(kv_length)

    try:
        self.keys.index_copy_(2, cache_position, key_states)
        self.values.index_copy_(2, cache_position, value_states)
    except NotImplementedError:
        self.keys[:, :, cache_position] = key_states
        self.values[:, :, cache_position] = value_states

    return self.keys, self.values


def update_window(self, key_states, value_states, *args, **kwargs):
    """Do what ``StaticSlidingWindowLayer.update`` does: keep the last ones, and one token moves a full window on."""
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)

    kv_length = key_states.shape[-2]
    current_length = self.cumulative_length_int
    is_full = current_length >= self.max_cache_len
    self.cumulative_length_int += kv_length

    if is_full:
        if key_states.shape[-2] == 1:
            new_keys = self.keys.roll(-1, dims=-2)
            new_values = self.values.roll(-1, dims=-2)
            index = torch.tensor([-1], dtype=int, device=self.device)
            new_keys[:, :, index] = key_states
            new_values[:, :, index] = value_states

            self.keys.copy_(new_keys)
            self.values.copy_(new_values)

            return self.keys, self.values
        else:
            full_key_states = torch.cat((self.keys[:, :, 1:, :], key_states), dim=-2)
            full_value_states = torch.cat((self.values[:, :, 1:, :], value_states), dim=-2)
    elif current_length + kv_length > self.max_cache_len:
        if current_length == 0:
            full_key_states = key_states
            full_value_states = value_states
        else:
            full_key_states = torch.cat((self.keys[:, :, :current_length, :], key_states), dim=-2)
            full_value_states = torch.cat((self.values[:, :, :current_length, :], value_states), dim=-2)
    else:
        cache_position = torch.arange(kv_length, device=self.device) + self.cumulative_length
        try:
            self.keys.index_copy_(2, cache_position, key_states)
            self.values.index_copy_(2, cache_position, value_states)
        except NotImplementedError:
            self.keys[:, :, cache_position] = key_states
            self.values[:, :, cache_position] = value_states

        self.cumulative_length.add_(kv_length)

        return self.keys, self.values

    self.keys.copy_(full_key_states[:, :, -self.max_cache_len :, :])
    self.values.copy_(full_value_states[:, :, -self.max_cache_len :, :])
    return full_key_states, full_value_states
