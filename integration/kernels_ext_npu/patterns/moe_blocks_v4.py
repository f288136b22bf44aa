"""The mixtures of experts of transformers 4: each expert is a module of its own, and the gate is linear or a module."""

from functools import partial
from typing import Any

from torch import nn

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Part, Pattern, ignores

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def _refuse(block: Any) -> str | None:
    """Return why a block is not served. Later changes, and what weights show, the kernel checks in every forward."""
    if getattr(block, "ep_rank", 0):  # DeepSeek-V2 splits experts itself
        return f"it has the experts of rank {block.ep_rank} only"
    experts = list(block.experts)
    weight = static_getattr(block.gate, "weight")
    if weight is not COMPUTED and len(experts) != weight.shape[0]:
        return f"its gate chooses among {weight.shape[0]} experts, and it has {len(experts)}"
    for expert in experts:
        for name in _PROJECTIONS:
            projection = getattr(expert, name, None)
            if projection is not None and type(projection) is not nn.Linear:
                kind = f"{type(projection).__module__}.{type(projection).__name__}"
                return f"a projection of an expert is a {kind}: one product of all experts needs plain weights"
    return None


_EXPERTS = Part(
    "experts",
    ("llama:LlamaMLP", "mixtral:MixtralBlockSparseTop2MLP"),
    "an expert is a {}, whose forward is not that of a gated MLP",
    is_called=True,  # where it has hooks
)

_block = partial(Pattern, parts=(_EXPERTS,), rechecks_every_call=True)
_QUIET = ignores(_refuse, jitter_noise=0.0)  # in training
_ALONE = ignores(_QUIET, shared_expert=None)
_NORMALISED = ignores(_refuse, norm_topk_prob=True, shared_expert=None)
PATTERNS = (
    _block("qwen3_moe:Qwen3MoeSparseMoeBlock@4", ("SparseMoEBlock",), _ALONE),
    _block("olmoe:OlmoeSparseMoeBlock@4", ("SparseMoEBlock",), _ALONE),
    _block("qwen2_moe:Qwen2MoeSparseMoeBlock@4", ("SparseMoEBlock",), _QUIET),
    _block("mixtral:MixtralSparseMoeBlock@4", ("SparseMoEBlock",), _NORMALISED),
    _block("deepseek_v3:DeepseekV3MoE@4", ("GatedMoEBlock",), _refuse),
    _block("deepseek_v2:DeepseekV2MoE@4", ("GatedMoEBlock",), _refuse),
)
