"""Calls of operators, each with what it computes, for test_formulas.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

FULL, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL = ((FULL,), (HALF,), (FP16,))
WITH_WIDE_PARAMETERS = (*ALL, (HALF, FULL), (FP16, FULL))


@dataclass(frozen=True)
class Case:
    """Hold a call of an operator, of tensors on the NPU, and its formula, of those on the CPU in float64.

    ``dtypes`` are for one run each, of the tensors, the last for all that are left. ``roundings`` of a result to its
    dtype, and those of gradients, None where there are none; ``of`` are the results that are differentiated.
    ``absolute`` is what float32 leaves of terms that cancel in a result, ``sums`` the same for a gradient, relative to
    the largest; where it ``cancels``, roundings are of that size, too.
    """

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    formula: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[torch.dtype, ...], ...] = ALL
    roundings: int = 1
    gradients: int | None = 1
    of: tuple[int, ...] = (0,)
    absolute: float = 1e-7
    sums: float = 1e-6
    cancels: bool = False
    scale: float = 1.0

    def drawn(self, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        every = [*dtypes, *dtypes[-1:] * len(self.shapes)]
        return [(self.scale * torch.randn(shape)).to(dtype) for shape, dtype in zip(self.shapes, every)]


# ---- activations -----------------------------------------------------------------------------------------------------
def fast(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def gelu_mul(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.gelu(a) * b


CURVE = {"absolute": 1e-6, "gradients": 2, "cancels": True, "sums": 2e-6, "scale": 3.0}  # both tails
CASES = {
    "npu_silu": Case(
        torch_npu.npu_silu, F.silu, ((8, 12),), ((FULL,), (FP16,)), **CURVE
    ),  # differentiated when rounded
    "npu_gelu": Case(torch_npu.npu_gelu, F.gelu, ((8, 12),), **CURVE),
    "npu_gelu, tanh": Case(
        lambda x: torch_npu.npu_gelu(x, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        ((8, 12),),
        **CURVE,
    ),
    "npu_fast_gelu": Case(torch_npu.npu_fast_gelu, fast, ((8, 12),), **CURVE),
    "fast_gelu": Case(torch_npu.fast_gelu, fast, ((8, 12),), **CURVE),
    "npu_mish": Case(torch_npu.npu_mish, F.mish, ((65,),), **CURVE | {"gradients": 1}),
    "npu_gelu_mul": Case(torch_npu.npu_gelu_mul, gelu_mul, ((2, 12),), ((FULL,),), gradients=None, absolute=1e-6),
}


# ---- gated units -----------------------------------------------------------------------------------------------------
def gated(activation: Callable[[Tensor], Tensor], dim: int, is_left: bool = True) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim)
        return activation(a) * b if is_left else a * activation(b)

    return formula


def geglu(shape: tuple[int, ...], dim: int, approximate: int, is_left: bool) -> Case:
    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate=("none", "tanh")[approximate])

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        return gated(gelu, dim, is_left)(x), gelu(x.chunk(2, dim)[0 if is_left else 1])

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch_npu.npu_geglu(x, dim, approximate, is_left)

    # of the other half: gelu, and its product; float16 rounds what it multiplies with, see below
    return Case(call, formula, (shape,), ((FULL,), (HALF,)), absolute=1e-5, gradients=2, scale=3.0)


def clipped(shape: tuple[int, ...], dim: int, is_woven: bool, alpha=1.702, limit=7.0, bias=1.0) -> Case:
    """Even and odd elements are those of the merged rows, not of dim."""

    def formula(x: Tensor) -> Tensor:
        rows = x.flatten(dim)
        a, b = (rows[..., ::2], rows[..., 1::2]) if is_woven else rows.chunk(2, -1)
        y = a.clamp(max=limit) * torch.sigmoid(alpha * a.clamp(max=limit)) * (b.clamp(-limit, limit) + bias)
        return y.unflatten(-1, (x.shape[dim] // 2, *x.shape[dim:][1:]))

    def call(x: Tensor) -> Tensor:
        return torch_npu.npu_clipped_swiglu(x, dim=dim, interleaved=is_woven, alpha=alpha, limit=limit, bias=bias)

    return Case(call, formula, (shape,), gradients=None, scale=3.0)


LAYOUTS = [((64,), -1), ((5, 128), -1), ((3, 64, 7), 1), ((128, 3, 2), 0), ((2, 3, 192), 2)]  # shape and dim
GEGLUS = {
    f"npu_geglu, {shape}, {('exact', 'tanh')[approximate]}, {('right', 'left')[is_left]}": geglu(
        shape, dim, approximate, is_left
    )
    for shape, dim in LAYOUTS
    for approximate in (0, 1)
    for is_left in (False, True)
}
CASES |= {
    f"npu_swiglu, {shape}": Case(partial(torch_npu.npu_swiglu, dim=dim), gated(F.silu, dim), (shape,), scale=3.0)
    for shape, dim in LAYOUTS
}
CASES |= GEGLUS | {
    f"{name}, float16": replace(case, formula=lambda x, f=case.formula: f(x)[0], dtypes=((FP16,),), roundings=2)
    for name, case in GEGLUS.items()
}
CASES |= {
    f"npu_clipped_swiglu, {('halves', 'woven')[is_woven]}{what}": clipped(shape, dim, is_woven, **options)
    for is_woven in (False, True)
    for what, shape, dim, options in (
        ("", (7, 3, 32), -1, {}),
        (", a dimension before the last", (3, 4, 5), 1, {}),
        (", other limits", (8, 32), -1, {"alpha": 1.0, "limit": 2.0, "bias": 0.5}),
    )
}


# ---- norms -----------------------------------------------------------------------------------------------------------
def rms(x: Tensor, gamma: Tensor, eps: float = 1e-6, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    rstd = (x.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + eps).rsqrt()
    return x * rstd * (offset + gamma), rstd


def rms_norm(shape: tuple[int, ...], eps: float, of_gamma: int = 1) -> Case:
    return Case(
        lambda x, gamma: torch_npu.npu_rms_norm(x, gamma, eps),
        lambda x, gamma: rms(x, gamma, eps),
        (shape, shape[-of_gamma:]),
        WITH_WIDE_PARAMETERS,
        sums=1e-5,
    )


def layer_norm(total: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = total.mean(-1, keepdim=True), (total.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    return F.layer_norm(total, gamma.shape, gamma, beta, eps), mean, rstd


def add_layer_norm(a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    return *layer_norm(a + b, gamma, beta, 1e-5), a + b


def deep_norm(x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, mean, rstd = layer_norm(0.7 * x + gx, gamma, beta, 1e-6)
    return mean, rstd, y


def group_norm_silu(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    groups = x.reshape(2, 2, -1)
    y = F.silu(F.group_norm(x, 2, *parameters, eps=1e-5))
    return y, groups.mean(-1), (groups.var(-1, correction=0) + 1e-5).rsqrt()


def group_norm_swish(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.group_norm(x, 3, weight, bias, eps=1e-5)
    return y * torch.sigmoid(0.5 * y)


ROWS = {"absolute": 4e-6, "sums": 1e-5, "gradients": 2, "cancels": True}
TWO_AND_PARAMETERS = ((2, 3, 16), (2, 3, 16), (16,), (16,))
CASES |= {
    "npu_rms_norm": rms_norm((5, 7), 1e-6),
    "npu_rms_norm, gamma of two": rms_norm((2, 3, 4, 5), 1e-6, 2),
    "npu_rms_norm, long rows": replace(
        rms_norm((7, 2, 2100), 1e-6), dtypes=tuple(d for d in WITH_WIDE_PARAMETERS if d != (FP16,))
    ),
    "npu_rms_norm, long rows of float16": replace(rms_norm((7, 2, 2100), 1e-6), dtypes=((FP16,),), roundings=2),
    "npu_gemma_rms_norm": Case(  # with weights that 1 + weight would lose in 16 bits
        torch_npu.npu_gemma_rms_norm,
        lambda x, gamma: rms(x, gamma, offset=1.0),
        ((4, 32), (32,)),
        gradients=None,
        scale=0.003,
    ),
    "npu_add_layer_norm": Case(
        lambda *tensors: torch_npu.npu_add_layer_norm(*tensors, 1e-5, True),
        add_layer_norm,
        TWO_AND_PARAMETERS,
        (*ALL, (HALF, HALF, FULL), (FP16, FP16, FULL)),
        of=(0, 3),
        **ROWS,
    ),
    "npu_add_layer_norm, two dtypes": Case(
        lambda *tensors: torch_npu.npu_add_layer_norm(*tensors, 1e-5, True),
        add_layer_norm,
        TWO_AND_PARAMETERS,
        ((FULL, HALF, FULL), (FULL, FP16, FULL)),
        absolute=4e-6,
        gradients=None,
    ),
    "npu_deep_norm": Case(
        lambda *tensors: torch_npu.npu_deep_norm(*tensors, 0.7, 1e-6), deep_norm, TWO_AND_PARAMETERS, of=(2,), **ROWS
    ),
    "npu_group_norm_silu": Case(
        lambda x: torch_npu.npu_group_norm_silu(x, None, None, 2),
        group_norm_silu,
        ((2, 4, 3, 5),),
        absolute=4e-6,
        gradients=None,
    ),
    "npu_group_norm_silu, affine": Case(
        lambda x, *p: torch_npu.npu_group_norm_silu(x, *p, 2),
        group_norm_silu,
        ((2, 4, 3, 5), (4,), (4,)),
        ((FULL,), (HALF, FULL), (FP16, FULL)),
        absolute=4e-6,
        gradients=None,
    ),
    "npu_group_norm_swish": Case(
        lambda x, *p: torch_npu.npu_group_norm_swish(x, 3, *p, eps=1e-5, swish_scale=0.5),
        group_norm_swish,
        ((2, 6, 5), (6,), (6,)),
        absolute=2e-5,
        gradients=6,  # which reads statistics that are rounded, too
        cancels=True,
        sums=2e-5,
    ),
    "npu_layer_norm_eval": Case(
        lambda x, *p: torch_npu.npu_layer_norm_eval(x, [8], *p),
        lambda x, *p: F.layer_norm(x, [8], *p),
        ((3, 4, 8), (8,), (8,)),
        ((HALF,),),
        absolute=1e-5,
        gradients=None,
    ),
}


# ---- rotation --------------------------------------------------------------------------------------------------------
def rotated(mode: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (2, -1)).mT if mode == "half" else x.unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1)
        return x * cos + (turned.mT if mode == "half" else turned).flatten(-2) * sin

    return formula


def rotary(x: tuple[int, ...], cos: tuple[int, ...], mode: str = "half", **options) -> Case:
    options = {"absolute": 1e-6, "sums": 1e-5} | options
    return Case(lambda *t: torch_npu.npu_rotary_mul(*t, mode), rotated(mode), (x, cos, cos), **options)


CASES |= {
    "npu_rotary_mul, BNSD by BNSD": rotary((2, 3, 40, 32), (2, 3, 40, 32)),
    "npu_rotary_mul, BNSD by 11SD": rotary((2, 3, 40, 32), (1, 1, 40, 32)),
    "npu_rotary_mul, BNSD by B1SD": rotary((2, 3, 40, 32), (2, 1, 40, 32)),
    "npu_rotary_mul, BSND by 1S1D": rotary((2, 5, 3, 64), (1, 5, 1, 64)),
    "npu_rotary_mul, BSND by BS1D": rotary((2, 5, 3, 6), (2, 5, 1, 6)),
    "npu_rotary_mul, SBND by S11D": rotary((5, 2, 3, 64), (5, 1, 1, 64)),
    "npu_rotary_mul, TND by T1D": rotary((7, 3, 128), (7, 1, 128)),
    "npu_rotary_mul, TND by TND": rotary((7, 3, 128), (7, 3, 128)),
    # a step of decoding: B < S is a limit of the gradient of cos
    "npu_rotary_mul, one position": rotary((2, 1, 16, 64), (2, 1, 1, 64), gradients=None),
    "npu_rotary_mul, a head of 84": rotary((1, 2, 3, 84), (1, 1, 3, 84)),  # from 80 on without alignment
    "npu_rotary_mul, pairs, 11SD": rotary((2, 3, 4, 16), (1, 1, 4, 16), "interleave"),
    "npu_rotary_mul, pairs, 1S1D": rotary((2, 5, 3, 6), (1, 5, 1, 6), "interleave"),
    "npu_rotary_mul, pairs, S11D": rotary((5, 2, 3, 64), (5, 1, 1, 64), "interleave"),
    "npu_rotary_mul, pairs, T1D": rotary((7, 3, 128), (7, 1, 128), "interleave"),
}


# ---- products --------------------------------------------------------------------------------------------------------
def batches(turned: bool, factor: int) -> Case:
    """Change the places of batch and rows, before the product and behind it."""

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.einsum("mbk,bkn->mbn" if turned else "bmk,bkn->mbn", x, weight)
        return y if factor == 1 else torch.stack(y.flatten(1).chunk(factor, -1))

    return Case(
        lambda x, weight: torch_npu.npu_transpose_batchmatmul(
            x, weight, perm_x1=[1, 0, 2] if turned else None, batch_split_factor=factor
        ),
        formula,
        ((3, 2, 16) if turned else (2, 3, 16), (2, 16, 32)),
        absolute=4e-6,
        gradients=None,
    )


ACTIVATIONS = {"fastgelu": fast, "gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu}


def feed_forward(activation: str, experts: str | None, **options) -> Case:
    lead = () if experts is None else (2,)
    given = {"tokens": {"expert_tokens": [4, 2]}, "index": {"expert_tokens_index": [4, 6]}}.get(experts, {})

    def call(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        return torch_npu.npu_ffn(x, w1, w2, activation, bias1=b1, bias2=b2, **given, **options)

    def formula(x: Tensor, *parameters: Tensor) -> Tensor:
        rows = x.view(6, 16)
        groups = [(rows, *parameters)] if experts is None else zip(rows.split([4, 2]), *parameters)
        parts = [ACTIVATIONS[activation](r @ w1 + b1) @ w2 + b2 for r, w1, w2, b1, b2 in groups]
        return torch.cat(parts).view(2, 3, 16)

    shapes = ((2, 3, 16), (*lead, 16, 32), (*lead, 32, 16), (*lead, 32), (*lead, 16))
    dtypes = ((FP16,),) if options else ((FP16,), (HALF, HALF, HALF, FULL))
    # what the activation gets and gives is rounded, too
    return Case(call, formula, shapes, dtypes, roundings=3, cancels=True, gradients=None, scale=0.5)


CASES |= {
    "npu_linear": Case(
        torch_npu.npu_linear, F.linear, ((3, 16), (4, 16), (4,)), ((FULL,), (FP16,)), absolute=4e-6, sums=4e-6
    ),
    **{
        f"npu_transpose_batchmatmul, {'turned, ' * turned}{factor}": batches(turned, factor)
        for turned in (False, True)
        for factor in (1, 2, 4)
    },
    **{
        f"npu_ffn, {activation}, {experts}": feed_forward(activation, experts)
        for activation in ACTIVATIONS
        for experts in (None, "tokens", "index")
    },
    "npu_ffn, precise": feed_forward("gelu", None, inner_precise=1),
}


# ---- losses ----------------------------------------------------------------------------------------------------------
TARGET, WORD_WEIGHTS = torch.tensor([3, 0, 10, 4, 4, 1]), torch.linspace(0.1, 1.1, 11)


def cross_entropy(reduction: str, ignored: int, is_weighted: bool, smoothing: float) -> Case:
    options = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
    target = TARGET.where(torch.arange(6) > 0, ignored)
    weight = WORD_WEIGHTS if is_weighted else None

    def call(x: Tensor) -> tuple[Tensor, ...]:
        moved = weight.npu() if is_weighted else None
        return torch_npu.npu_cross_entropy_loss(x, target.npu(), moved, **options)

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(x, target, weight.double() if is_weighted else None, **options)
        return loss.view(-1), torch.log_softmax(x, -1)

    # a mean has a gradient of all rows alike, which reads the logarithms as they were rounded
    has_gradient = not smoothing and (ignored < 0 and not is_weighted if reduction == "mean" else True)
    gradients = 4 if has_gradient else None
    options_of_case = {"absolute": 2e-6, "sums": 2e-6, "cancels": True, "gradients": gradients}
    return Case(call, formula, ((6, 11),), ((FULL,), (HALF,)), **options_of_case)


CASES |= {
    f"npu_cross_entropy_loss, {given}": cross_entropy(*given)
    for given in product(("mean", "sum", "none"), (-100, 4), (False, True), (0.0, 0.2))
}
