"""Linear layers with adapters of low rank, in few bits, and of patches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.cases import Function, drawn

TOKENS, INPUTS, OUTPUTS, RANK, SCALE = 12, 32, 48, 4, 2.0
MANY, WIDE = 4096, 1024  # tokens, and what is large with so many of them
LEADING = {"": (2, TOKENS), "one token": (1,), "one dimension": (), "four dimensions": (2, 1, 3)}
# exact in 16 bits: it is no argument, so that nothing asks for its gradient
FROZEN = torch.linspace(-1, 1, OUTPUTS * INPUTS).view(OUTPUTS, INPUTS).mul(64).round().div(64)
ADAPTED = drawn((2, TOKENS, INPUTS), (RANK, INPUTS), (OUTPUTS, RANK))
# of four bits, and two scales for each row of them, exact in 16 bits
FOUR_BITS = (torch.arange(OUTPUTS * 2 * INPUTS).mul(5).remainder(16) - 8).view(OUTPUTS, -1).to(torch.int8)
SCALES = torch.arange(1, 2 * OUTPUTS + 1).view(OUTPUTS, 2) / 256
# nothing is dropped with it, by the code that drops: which elements are, no formula knows
NEVER = 1e-9


def _adapter(function: Callable, a: Tensor, b: Tensor, p: float = 0.0) -> Any:
    return function.__globals__["Adapter"](a, b, SCALE, p=p)


def _adapted(function: Callable, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return function(x, FROZEN.to(x), None, [_adapter(function, a, b)])


def _adapted_together(function: Callable, x: Tensor, a: Tensor, b: Tensor, p: float = 0.0) -> tuple[Tensor, ...]:
    return function(x, [(FROZEN.to(x), None, _adapter(function, a, b, p))] * 2)


def _adapted_pair(function: Callable, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    neighbours = torch.cat((FROZEN, FROZEN)).to(x).chunk(2)
    return function(x, [(weight, None, _adapter(function, a, b)) for weight in neighbours])


def _dequantised(dtype: torch.dtype, packed: Tensor, out: Tensor | None = None) -> Tensor:
    values = packed.to(dtype) / 64
    return values if out is None else out.copy_(values)


def _quantised(function: Callable, x: Tensor) -> Any:
    """Return the frozen weight as bytes, of which it is made when a layer multiplies."""
    packed = (FROZEN * 64).to(x.device, torch.int8)
    made = partial(_dequantised, x.dtype)
    return function.__globals__["QuantizedWeight"](packed, made, (OUTPUTS, INPUTS), x.dtype)


def _adapted_quantised(function: Callable, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return function(x, _quantised(function, x), None, [_adapter(function, a, b)])


def _adapted_quantised_pair(function: Callable, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return function(x, [(_quantised(function, x), None, _adapter(function, a, b))] * 2)


def _beside_bfloat16(function: Callable, a: Tensor, b: Tensor) -> Tensor:
    """Compute adapters of float32, those of 16 bits beside a layer of bfloat16: what is large of it is not cast."""
    dtype = torch.float32 if a.dtype is torch.float32 else torch.bfloat16
    weight, x = (constant.to(a.device, dtype) for constant in _constants(a, b))
    return function(x, weight, None, [_adapter(function, a.float(), b.float())])


def _exactly_beside(a: Tensor, b: Tensor) -> Tensor:
    weight, x = _constants(a, b)
    return _exactly_adapted(x.to(a), a, b, weight)


def _constants(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return a weight and an input of 4096 rows that fit to factors, exact in 16 bits; gradients are within float16."""
    sizes = b.shape[0], MANY
    return [torch.linspace(-1, 1, n * a.shape[1]).view(n, -1).mul(64).round().div(256) for n in sizes]


def _exactly_adapted(x: Tensor, a: Tensor, b: Tensor, weight: Tensor = FROZEN) -> Tensor:
    return F.linear(x, weight.to(x)) + SCALE * F.linear(F.linear(x, a), b)


def _both_adapted(*tensors: Tensor) -> list[Tensor]:
    return [_exactly_adapted(*tensors)] * 2


def _functions(at: str, leading: tuple[int, ...]) -> list[Function]:
    x = (*leading, INPUTS)
    adapter = drawn(x, (RANK, INPUTS), (OUTPUTS, RANK))
    function = partial(Function, "Linear", at=at)
    dropping = partial(_adapted_together, p=NEVER)
    return [
        function("lora_linear", _adapted, _exactly_adapted, adapter),
        function("lora_linears", _adapted_together, _both_adapted, adapter),
        function("lora_linears", dropping, _both_adapted, adapter, at=f"dropout{at and ', '}{at}"),
        function("lora_pair", _adapted_pair, lambda *t: torch.cat(_both_adapted(*t), -1), adapter),
        function("quantised_linear", _in_few_bits, lambda x: F.linear(x, FROZEN.to(x)), drawn(x)),
    ]


def _in_few_bits(function: Callable, x: Tensor, rounds_input: bool = False) -> Tensor:
    numbers, scale = (FROZEN * 64).to(x.device, torch.int8), x.new_full((OUTPUTS, 1), 1 / 64)
    return function(x, numbers, scale, rounds_input=rounds_input)


def _in_four_bits(function: Callable, x: Tensor) -> Tensor:
    """With two scales in a row, of neighbours that were packed into int32 eight by eight."""
    pieces = [(FOUR_BITS[:, place::8].long() & 15) << 4 * place for place in range(8)]
    packed = sum(pieces[1:], pieces[0]).to(torch.int32).to(x.device)
    return function(x, packed, SCALES.to(x), None, INPUTS)


def _exactly_in_four_bits(x: Tensor) -> Tensor:
    return F.linear(x, FOUR_BITS.to(x) * SCALES.to(x).repeat_interleave(INPUTS, 1))


def _exactly_rounded(x: Tensor) -> Tensor:
    step = x.detach().abs().amax(-1, keepdim=True) / 127
    return F.linear(torch.round(x.detach() / step) * step + (x - x.detach()), FROZEN.to(x))


def _patches(at: str, convolution: Callable[..., Tensor], patch: tuple[int, ...]) -> Function:
    """With pixels behind the last patch."""
    tensors = drawn((2, 3, *(2 * length + 1 for length in patch)), (OUTPUTS, 3, *patch), (OUTPUTS,))
    exact = partial(convolution, stride=patch)
    return Function("Linear", "patch_embedding", lambda f, *t: f(*t), exact, tensors, at)


FUNCTIONS = (
    *(function for at, leading in LEADING.items() for function in _functions(at, leading)),
    *(
        Function("Linear", "lora_linear", _beside_bfloat16, _exactly_beside, drawn((RANK, size), (other, RANK)), at)
        for at, size, other in (("a large input", WIDE, OUTPUTS), ("a large output", INPUTS, WIDE))
    ),
    Function("Linear", "lora_linear", _adapted_quantised, _exactly_adapted, ADAPTED, "a weight in few bits"),
    Function(
        "Linear",
        "lora_pair",
        _adapted_quantised_pair,
        lambda *tensors: torch.cat(_both_adapted(*tensors), -1),
        ADAPTED,
        "weights in few bits",
    ),
    Function("Linear", "quantised_linear", _in_four_bits, _exactly_in_four_bits, drawn((12, 2 * INPUTS)), "four bits"),
    Function(
        "Linear",
        "quantised_linear",
        partial(_in_few_bits, rounds_input=True),
        _exactly_rounded,
        drawn((TOKENS, INPUTS)),
        "an input in int8",
    ),
    _patches("", F.conv2d, (4, 3)),
    _patches("three dimensions", F.conv3d, (2, 4, 4)),
)
