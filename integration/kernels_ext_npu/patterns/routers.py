"""The routers of transformers: they choose experts by the softmax or the sigmoid of logits, some with a correction."""

from dataclasses import replace

import torch
from torch import nn

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
)
