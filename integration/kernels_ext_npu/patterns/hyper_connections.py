"""Hyper-connections of transformers: weights by which residual streams become one, and a result all of them."""

from kernels_ext_npu.patterns.pattern import Part, Pattern, require

_ROUNDS = require(
    lambda module: module.hc_eps > 0 and module.hc_sinkhorn_iters >= 1,
    "hc_eps is {0.hc_eps} and hc_sinkhorn_iters {0.hc_sinkhorn_iters}: its weights may have no logarithm",
)
_NORMED = (Part("input_norm", ("deepseek_v4:DeepseekV4UnweightedRMSNorm",), "its input_norm is a {}"),)
# gives the scale of a norm, and not what it norms
_SCALED = (Part("input_norm", ("hy_v4:HYV4UnweightedRMSNorm",), "its input_norm is a {}"),)
PATTERNS = (
    Pattern("deepseek_v4:DeepseekV4HyperConnection", ("HyperConnection",), _ROUNDS, parts=_NORMED),
    Pattern("hy_v4:HYV4HyperConnection", ("IndependentHyperConnection",), parts=_SCALED),
    Pattern("deepseek_v4:DeepseekV4HyperHead", ("HyperHead",), parts=_NORMED),
    Pattern("hy_v4:HYV4HyperHead", ("HyperHead",), parts=_SCALED),
)
