"""Limits of a swapped kernel on this machine's release of CANN: a reason, which names the release without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from kernels_ext_npu.catalogue import ATTENTION, EXPERTS, LAYERS, ROTARY
from kernels_ext_npu.machine import cann_releases
from kernels_ext_npu.machine.cann_releases import Limit, Release
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
    limits = {decision: _limit(decision, view.model, release) for decision in served if decision.doubt is None}
    found = {decision: limit for decision, limit in limits.items() if limit is not None and limit.holds(release)}
    return {decision: Reason("release", cann_releases.sentence(limit, release)) for decision, limit in found.items()}


def _limit(decision: Decision, model: nn.Module, release: Release) -> Limit | None:
    """Return the limit that what is served is beyond."""
    kernel, kind, module = decision.present or "", decision.kind, decision.module
    if kernel.startswith(_GATED):
        if not _is_deepseek_v3(kernel, module):
            return cann_releases.ROUTING
        return cann_releases.ROUTING_IN_TRAINING if module.training else None
    if kind is EXPERTS and module.training:
        return _training_limit(decision, model, release)
    if LAYERS.get(kernel) == "RMSNorm" and "ZeroCentered" in kernel and module.training:
        return None if _dtype(module) is torch.float32 else cann_releases.NORMS_IN_TRAINING
    if LAYERS.get(kernel) == "Activation" and "Quick" in kernel:
        return cann_releases.FAST_GELU
    if kind not in (ATTENTION, ROTARY):
        return None
    heads, size = _heads(module, model)
    if kind is ATTENTION and size > 512:
        return cann_releases.PACKED_HEADS
    if kind is ROTARY and 0 < size <= 128:  # larger ones are rotated apart everywhere
        if release < (8, 5):
            return cann_releases.ROTATED if 9 * heads * size > _LOCAL_FLOATS else None
        return cann_releases.ROTATED_IN_8_5 if 7 * heads * size + 10 * size > _LOCAL_FLOATS else None
    return None


def _training_limit(decision: Decision, model: nn.Module, release: Release) -> Limit | None:
    """Return the limit of experts in training, the one that costs more where there are two."""
    experts = decision.module
    is_float32 = _dtype(experts) is torch.float32
    if release < (8, 3) and any(parameter.requires_grad for parameter in experts.parameters()):
        return cann_releases.EXPERTS_IN_FLOAT32 if is_float32 else cann_releases.EXPERTS
    block = model.get_submodule(decision.path.rpartition(".")[0])
    # routers that correct their scores give weights in float32, as those of DeepSeek-V3
    corrects = any(hasattr(part, "e_score_correction_bias") for part in (*experts.children(), *block.children()))
    return cann_releases.EXPERTS_CHOSEN_IN_FLOAT32 if corrects and not is_float32 else None


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
