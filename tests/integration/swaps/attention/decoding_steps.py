"""A prompt and tokens behind it, one and several at a time."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.support.nearness import assert_near

PROMPT, KEYS = 14, 20


def steps(model: PreTrainedModel, cache) -> list[Tensor]:
    """The logits of a prompt with padding, of two single tokens and of three, behind each other."""
    ids = torch.randint(2, 90, (2, KEYS - 1), generator=torch.Generator().manual_seed(0)).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places, found, start = (mask.cumsum(-1) - 1).clamp(min=0), [], 0
    with torch.no_grad():
        for end in (PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 5):
            inputs = {"input_ids": ids[:, start:end], "position_ids": places[:, start:end]}
            outputs = model(**inputs, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            found.append(outputs.logits.cpu()[:, -min(3, end - start) :])
            start = end
    return found


def assert_same_steps(model: PreTrainedModel, ours: PreTrainedModel, caches: list | None = None) -> None:
    """Compare all of them with those of the model itself; caches grow where none are given."""
    caches = caches or [DynamicCache(config=each.config) for each in (model, ours)]
    for expected, found in zip(*map(steps, (model, ours), caches), strict=True):
        assert_near(found, expected)
