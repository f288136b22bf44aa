"""The routers of transformers, and its experts whose weights are one tensor for each projection.

Routers choose experts by the softmax or the sigmoid of logits, some with a correction.

transformers' ``use_experts_implementation`` gives most classes of experts one forward, which calls an implementation
by the name in the model's config. What a class computes is said by the flags that the decorator sets on its instances,
and by its ``_apply_gate``; the decorator itself is the pattern (matching/fingerprint.py). Others have no such
interface, and Llama 4's are served as a block with their router, since they see every token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Part, Pattern, ignores, require

_UNGROUPED = require(
    lambda router: router.num_group is None,
    "it fills groups that are not chosen with 0, and the operator leaves them out: a negative bias tells",
)
_SCORING = Part("scoring_function", ("torch:Sigmoid",), "it scores with {}, the kernel with a sigmoid")
_SCORES = replace(_SCORING, name="score_fn")
_GREEDY = require(
    lambda router: router.topk_method in ("greedy", "group_limited_greedy"),
    "its topk_method is {0.topk_method}, the kernel has greedy and group_limited_greedy",
)
_WIDE = require(
    lambda router: (weight := static_getattr(router, "weight")) is COMPUTED or weight.dtype is torch.float32,
    "it compares probabilities that are rounded to {0.weight.dtype}, and the operator compares them in float32",
)
_BY_SOFTMAX = require(
    lambda router: router.expert_selection_fn == "softmax",
    "its expert_selection_fn is {0.expert_selection_fn}, the kernel has softmax",
)
# the tree says super().forward, and not of what
_LINEAR = require(lambda router: type(router).__bases__ == (nn.Linear,), "its product is not that of a linear layer")
_STATICS = Part("moe_statics", ("ernie4_5_moe:Ernie4_5_MoeStatics",), "its moe_statics is a {}")

_NORMALISED = ignores(norm_topk_prob=True)


def _refuse_called_by_name(module: Any) -> str | None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = static_getattr(module, name)
        if weight is not COMPUTED and type(weight) not in (nn.Parameter, torch.Tensor, FakeTensor, DTensor):
            return f"its {name} is a {type(weight).__name__}"
    return None


def _refuse_weights(experts: Any, names: Sequence[str] = ("gate_up_proj", "down_proj")) -> str | None:
    others = [name for name in names if type(experts._parameters.get(name)) not in (nn.Parameter, FakeTensor)]
    return f"its {others[0]} is no plain weight" if others else None


_MLP = Part("mlp", ("dbrx:DbrxExpertGLU",), "its mlp is a {}")
_EXPERTS = Part("experts", ("llama4:Llama4TextExperts",), "its experts are {}")
_ROUTER = Part("router", ("llama4:Llama4Router",), "its router is a {}", is_called=True)

PATTERNS = (
    Pattern("deepseek_v3:DeepseekV3TopkRouter", ("SigmoidTopKRouter",)),
    Pattern("beam:BeamTopKRouter", ("SigmoidTopKRouter",), ignores(routed_scaling_factor=1.0)),
    Pattern("hy_v3:HYV3TopKRouter", ("SigmoidTopKRouterGivenBias",)),
    Pattern("minimax_m3_vl:MiniMaxM3VLTopKRouter", ("SigmoidTopKRouterNarrow",)),
    Pattern("minimax_m2:MiniMaxM2TopKRouter", ("SigmoidTopKRouterNarrowGivenBias",)),
    Pattern("flint:FlintTopKRouter", ("SigmoidTopKRouterUnbiased",)),
    Pattern("afmoe:AfmoeTokenChoiceRouter", ("SigmoidTopKRouterLinear",)),
    Pattern("laguna:LagunaTopKRouter", ("SigmoidTopKRouterSoftcapped",)),
    Pattern("axk2:AXK2TopkRouter", ("SigmoidTopKRouterUngrouped",), _UNGROUPED, rechecks_every_call=True),
    Pattern(
        "muse_spark:MuseSparkTopkRouter", ("SigmoidTopKRouterMultiplied",), parts=(_SCORING,), rechecks_every_call=True
    ),
    Pattern(
        "inkling2:Inkling2TopKRouter", ("SigmoidTopKRouterNormalised",), parts=(_SCORES,), rechecks_every_call=True
    ),
    Pattern("qwen3_moe:Qwen3MoeTopKRouter", ("SoftmaxTopKRouter",)),
    Pattern("qwen3_5_moe:Qwen3_5MoeTopKRouter", ("SoftmaxTopKRouter",), _NORMALISED),
    Pattern("mixtral:MixtralTopKRouter", ("SoftmaxTopKRouterFloat32",), _NORMALISED),
    Pattern("lara_mini:LaraMiniTopKRouter", ("SoftmaxTopKRouterInFloat32",)),
    Pattern("jamba:JambaTopKRouter", ("SoftmaxTopKRouterUnnormalised",)),
    Pattern("hunyuan_v1_moe:HunYuanMoEV1Gate", ("SoftmaxTopKRouterLinear",)),
    Pattern("granitemoe:GraniteMoeTopKRouter", ("TopKSoftmaxRouter",)),
    Pattern("cohere2_moe:Cohere2MoeTopKRouter", ("TopKRouter",), _BY_SOFTMAX, rechecks_every_call=True),
    Pattern("llama4:Llama4Router", ("SigmoidScatterRouter",), _LINEAR),
    Pattern("longcat_flash:LongcatFlashTopkRouter", ("BiasedSoftmaxTopKRouter",)),
    Pattern("ernie4_5_moe:Ernie4_5_MoeTopKRouter", ("CorrectedSoftmaxTopKRouter",), parts=(_STATICS,)),
    Pattern("mistral_large4:MistralLarge4TextTopkRouter", ("GroupedSoftmaxTopKRouterNormalised",)),
    Pattern("deepseek_v2:DeepseekV2TopkRouter", ("GroupedSoftmaxTopKRouter",), _GREEDY, rechecks_every_call=True),
    Pattern("mistral4:Mistral4TopkRouter", ("GroupedSoftmaxTopKRouterNarrow",), _WIDE, rechecks_every_call=True),
    Pattern("qwen3_moe:Qwen3MoeExperts", ("MoEExperts",), _refuse_called_by_name),
    Pattern("step3p7:Step3p7Experts", ("ClampedExperts",), _refuse_weights),
    Pattern("dbrx:DbrxExperts", ("FlatExperts",), lambda m: _refuse_weights(m.mlp, ("w1", "v1", "w2")), parts=(_MLP,)),
    Pattern(
        "llama4:Llama4TextMoe",
        ("ScaledTokensMoEBlock",),
        lambda m: _refuse_weights(m.experts),
        parts=(_EXPERTS, _ROUTER),
    ),
)
