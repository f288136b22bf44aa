"""Norms, gated units and activations, with sizes at and around the limits of their operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.cases import Function, Shapes, at_limits, drawn

HIDDEN, EPS, LIMIT, ROUNDS = 32, 1e-6, 0.75, 20
# npu_rms_norm takes two to eight dimensions; rows of one element and of no power of two, as models have them
ROWS = {
    "": (6, HIDDEN),
    "two elements a row": (5, 2),
    "one row": (1, HIDDEN),
    "an odd size": (3, 123),
    "two beyond a block": (2, 130),
    "a row of 8,192": (2, 8192),
    "one dimension": (HIDDEN,),
    "eight dimensions": (1, 2, 1, 2, 1, 2, 1, HIDDEN),
    "nine dimensions": (1, 2, 1, 2, 1, 2, 1, 1, HIDDEN),
    "70,000 rows": (70000, 8),
}
# two values less their mean are one and minus one; the gradient of a bias is a sum that is close to zero
NOT_OF_LAYERS = ("two elements a row", "70,000 rows")
# npu_swiglu_backward takes halves of whole blocks of 64 bytes: 16 values of float32, 32 of narrower dtypes
UNITS: dict[str, Shapes] = {
    "": [(6, 2 * HIDDEN)],
    "half a block in float32": [(6, 16)],
    "a block in float32": [(6, 32)],
    "one value beyond a block": [(6, 66)],
    "one row": [(1, 2 * HIDDEN)],
    "a row of 16,384": [(2, 16384)],
    "eight dimensions": [(1, 2, 1, 2, 1, 2, 1, 2 * HIDDEN)],
}
# streams, values of each, and the dimensions before them
STREAMS = {"": (4, HIDDEN, 2, 3), "one token": (4, 8, 1), "two streams of an odd size": (2, 33, 5)}
VALUES: dict[str, Shapes] = {
    "": [(6, HIDDEN)],
    "one value": [(1,)],
    "eight dimensions": [(2,) * 8],
    "nine dimensions": [(2,) * 9],
}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a gated unit of an activation: of the first half, times the second."""

    def unit(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return unit


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + (-1.702 * x).exp())


def clipped_swiglu(x: Tensor) -> Tensor:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # takes as long as all that is above

    return GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), x)  # type: ignore[arg-type]


def clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


def hyper_connection(x: Tensor, weight: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-2]
    flat = F.rms_norm(x.flatten(-2), weight.shape[1:], None, EPS)
    pre, post, mixed = (flat @ weight.T).split([n, n, n * n], -1)
    parts = zip((pre, post, mixed), scale, base.split([n, n, n * n]))
    pre, post, mixed = (value * by + added for value, by, added in parts)
    mixed = mixed.unflatten(-1, (n, n)).softmax(-1) + EPS
    for dim in (-2, *(-1, -2) * (ROUNDS - 1)):
        mixed = mixed / (mixed.sum(dim, keepdim=True) + EPS)
    return 2 * post.sigmoid(), mixed, ((pre.sigmoid() + EPS).unsqueeze(-1) * x).sum(-2)


def _squares(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Square what is compared: rows and columns of weights sum to one, so that a ramp over them has no gradient."""
    return [output.square() for output in outputs]


def _streams(count: int, hidden: int, *lead: int) -> tuple[Tensor, ...]:
    rows, columns = (2 + count) * count, count * hidden
    x, weight, base, scale = drawn((*lead, count, hidden), (rows, columns), (rows,), (3,))()
    return x, weight / math.sqrt(columns), base, scale


def _norms() -> list[Function]:
    calls: dict[str, tuple[Callable, Callable]] = {  # the rows come first, then vectors as long as a row
        "rms_norm": (lambda f, x, w: f(x, w, EPS), rms_norm),
        "zero_centered_rms_norm": (lambda f, x, w: f(x, w, EPS), lambda x, w: rms_norm(x, 1 + w)),
        "add_rms_norm": (lambda f, x, r, w: f(x, r, w, EPS), lambda x, r, w: (rms_norm(x + r, w), x + r)),
        "layer_norm": (lambda f, x, w: f(x, w, None, EPS), layer_norm),
        "add_layer_norm": (lambda f, x, r, w, b: f(x, r, w, b, EPS), lambda x, r, w, b: layer_norm(x + r, w, b)),
    }
    found = []
    for name, (call, exact) in calls.items():
        rows, vectors = 1 + ("add" in name), 1 + (name == "add_layer_norm")
        at = {each: shape for each, shape in ROWS.items() if "layer" not in name or each not in NOT_OF_LAYERS}
        shapes = {each: [*[shape] * rows, *[shape[-1:]] * vectors] for each, shape in at.items()}
        found += at_limits("RMSNorm", name, call, exact, shapes)
    return found


FUNCTIONS = (
    *_norms(),
    *(
        Function(
            "RMSNorm",
            "hyper_connection",
            lambda f, *given: _squares(f(*given, EPS, EPS, ROUNDS)),
            lambda *given: _squares(hyper_connection(*given)),
            partial(_streams, *sizes),
            at,
        )
        for at, sizes in STREAMS.items()
    ),
    *at_limits("SwiGLU", "swiglu", lambda f, x: f(x), gated(F.silu), UNITS),
    *at_limits("SwiGLU", "geglu", lambda f, x: f(x), gated(gelu_tanh), UNITS),
    *at_limits("SwiGLU", "clamped_swiglu", lambda f, x: f(x, limit=LIMIT), clamped_swiglu, UNITS),
    *at_limits("SwiGLU", "clipped_swiglu", lambda f, x: f(x), clipped_swiglu, UNITS),
    *at_limits("Activation", "gelu_tanh", lambda f, x: f(x), gelu_tanh, VALUES),
    *at_limits("Activation", "quick_gelu", lambda f, x: f(x), quick_gelu, VALUES),
)
