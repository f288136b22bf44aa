"""Limits of a swapped kernel on this machine's release of CANN: a reason, which names the release without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from kernels_ext_npu.catalogue import ATTENTION, EXPERTS, LAYERS, ROTARY
from kernels_ext_npu.machine import cann_releases
from kernels_ext_npu.machine.cann_releases import Limit
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps.decision import Decision, View

# layers whose routing is npu_moe_gating_top_k, by how their names begin
_GATED = ("SigmoidTopKRouter", "GroupedSoftmaxTopKRouter", "BiasedSoftmaxTopKRouter", "CorrectedSoftmaxTopKRouter")
_DEEPSEEK_V3 = {"num_experts": 256, "num_group": 8, "topk_group": 4, "norm_topk_prob": True}
_MOST_CHOICES = 32
_LOCAL_FLOATS = 192 * 1024 // 4  # memory of a vector core; RoPE's one_token.py has the source


def remarks(view: View, served: list[Decision]) -> dict[Decision, Reason | None]:
    """Say what the release of this machine serves less of what is served in a model than a later one."""
    release = cann_releases.parse_release(getattr(torch.version, "cann", None))  # as kernels read it when loaded
    if not any(limit.holds(release) for limit in cann_releases.LIMITS):
        return {}
    found: dict[Decision, Reason | None] = {}
    for decision in served:
        limit = next((each for each in _limits(decision, view.model) if each.holds(release)), None)
        if limit is not None and decision.doubt is None:
            found[decision] = Reason("release", cann_releases.sentence(limit, release))
    return found


def _limits(decision: Decision, model: nn.Module) -> Iterator[Limit]:
    """Yield the limits of releases that what is served is beyond, first what costs most."""
    kernel, kind, module = decision.present or "", decision.kind, decision.module
    if kernel.startswith(_GATED):
        if not _is_deepseek_v3(kernel, module):
            yield cann_releases.ROUTING
        elif module.training:
            yield cann_releases.ROUTING_IN_TRAINING
    elif kind is EXPERTS and module.training:
        is_float32 = _dtype(module) is torch.float32
        if any(parameter.requires_grad for parameter in module.parameters()):
            yield cann_releases.EXPERTS_IN_FLOAT32 if is_float32 else cann_releases.EXPERTS
        block = model.get_submodule(decision.path.rpartition(".")[0])
        # routers that correct their scores give weights in float32, as those of DeepSeek-V3
        corrects = any(hasattr(part, "e_score_correction_bias") for part in (*module.children(), *block.children()))
        if corrects and not is_float32:
            yield cann_releases.EXPERTS_CHOSEN_IN_FLOAT32
    elif LAYERS.get(kernel) == "RMSNorm" and "ZeroCentered" in kernel and module.training:
        if _dtype(module) is not torch.float32:
            yield cann_releases.NORMS_IN_TRAINING
    elif LAYERS.get(kernel) == "Activation" and "Quick" in kernel:
        yield cann_releases.FAST_GELU
    elif kind is ATTENTION and _heads(module, model)[1] > 512:
        yield cann_releases.PACKED_HEADS
    elif kind is ROTARY:
        heads, size = _heads(module, model)
        if size <= 128 and 9 * heads * size > _LOCAL_FLOATS:  # larger ones are rotated apart everywhere
            yield cann_releases.ROTATED
        if size <= 128 and 7 * heads * size + 10 * size > _LOCAL_FLOATS:
            yield cann_releases.ROTATED_IN_8_5


def _dtype(module: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in module.parameters()), None)


def _is_deepseek_v3(kernel: str, router: Any) -> bool:
    same = all(getattr(router, name, None) == value for name, value in _DEEPSEEK_V3.items())
    return kernel == "SigmoidTopKRouter" and same and router.top_k <= _MOST_CHOICES


def _heads(module: nn.Module, model: nn.Module) -> tuple[int, int]:
    """Return how many heads the attention of a module has, and of which size; zeros where its config does not say."""
    config = getattr(module, "config", None) or getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return 0, 0
    config = config.get_text_config()
    try:  # one whose layers differ has no number for all of them
        heads = config.num_attention_heads
        return heads, getattr(config, "head_dim", None) or config.hidden_size // heads
    except Exception:  # transformers raises classes of its own, or AttributeError
        return 0, 0
