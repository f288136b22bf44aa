"""A language model that is in no library, as a checkpoint brings one with it: `save` writes it with this file."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast


class KiteConfig(PreTrainedConfig):
    model_type = "kite"

    def __init__(self, vocab_size=128, width=64, layers=2, heads=4, inner=96, **kwargs):
        self.vocab_size, self.hidden_size, self.inner = vocab_size, width, inner
        self.num_hidden_layers, self.num_attention_heads = layers, heads
        super().__init__(**kwargs)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(0.5 + torch.arange(width) / width)

    def forward(self, x):
        wide = x.float()
        return self.gain * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attend(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number, self.heads = number, config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, mask, cache):
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.number)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.both = nn.Linear(config.hidden_size, 2 * config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.before, self.between = Norm(config.hidden_size), Norm(config.hidden_size)
        self.attend, self.feed = Attend(config, number), Feed(config)

    def forward(self, x, *others):
        x = x + self.attend(self.before(x), *others)
        return x + self.feed(self.between(x))


class KiteForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = KiteConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, past_key_values=None, labels=None, use_cache=False, **kwargs):
        x = self.embed(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        begin = 0 if past_key_values is None else past_key_values.get_seq_length()
        size = self.config.hidden_size // self.config.num_attention_heads
        places = torch.arange(begin, begin + x.shape[1], device=x.device)
        steps = 1e4 ** -(torch.arange(0, size, 2, device=x.device).float() / size)
        angles = torch.outer(places.float(), steps).repeat(1, 2)
        mask = torch.arange(begin + x.shape[1], device=x.device) <= places[:, None]
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), mask[None, None], past_key_values)
        logits = self.lm_head(self.norm(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def save(folder: Path) -> Path:
    """Write a checkpoint with random weights, and this file, into a folder."""
    KiteConfig.register_for_auto_class()
    KiteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    torch.manual_seed(0)
    KiteForCausalLM(KiteConfig()).save_pretrained(folder)
    return folder
