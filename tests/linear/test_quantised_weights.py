"""Frozen weights in few bits: each function gives what it gives with the weight itself, which it never keeps."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.nearness import assert_near

H, N, ROWS = 16, 24, 7
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),  # as peft prepares models in few bits
    (torch.bfloat16, torch.float32, torch.float32),
]
by_dtype = pytest.mark.parametrize(("of_x", "of_weight", "of_adapters"), DTYPES, ids=str)


class Made:
    """A weight in int8 with one scale for all, and how often it was made."""

    def __init__(self, kernel: ModuleType, dtype: torch.dtype, seed: int) -> None:
        self.packed = torch.randint(
            -9, 9, (N, H), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
        ).npu()
        self.times = 0
        self.matrix = self.packed.to(dtype) * 0.125
        self.given = kernel.QuantizedWeight(self.packed, self.dequantize, (N, H), dtype)

    def dequantize(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        self.times += 1
        made = packed.to(self.matrix.dtype) * 0.125
        return made if out is None else out.copy_(made)


def adapters(kernel: ModuleType, dtype: torch.dtype, number: int, p: float = 0.0) -> list:
    torch.manual_seed(number)
    factors = [(torch.randn(4, H), torch.randn(N, 4)) for _ in range(number)]
    return [
        kernel.Adapter(a.to(dtype).npu().requires_grad_(), b.to(dtype).npu().requires_grad_(), 0.5, None, p)
        for a, b in factors
    ]


def one(kernel: ModuleType, x: Tensor, weights: list, given: list) -> list[Tensor]:
    return [kernel.lora_linear(x, weights[0], None, given[:1])]


def several(kernel: ModuleType, x: Tensor, weights: list, given: list) -> list[Tensor]:
    return list(kernel.lora_linears(x, [(weight, None, adapter) for weight, adapter in zip(weights, given)]))


def pair(kernel: ModuleType, x: Tensor, weights: list, given: list) -> list[Tensor]:
    found = kernel.lora_pair(x, [(weight, None, adapter) for weight, adapter in zip(weights, given)])
    return several(kernel, x, weights, given) if found is None else list(found.chunk(2, -1))


FUNCTIONS: dict[str, tuple[Callable[..., list[Tensor]], int, float]] = {
    "one": (one, 1, 0.0),
    "one that drops": (one, 1, 0.25),
    "several": (several, 3, 0.0),
    "several that drop": (several, 3, 0.25),
    "a pair": (pair, 2, 0.0),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def step(run: Callable[..., list[Tensor]], x: Tensor, weights: list, given: list) -> list[Tensor]:
    """Return the outputs of a function, and the gradients of its input and of all factors."""
    torch.manual_seed(0)  # of the masks
    x = x.detach().requires_grad_()
    outputs = run(x=x, weights=weights, given=given)
    sum(y.float().square().sum() for y in outputs).backward()
    leaves = [x, *(factor for adapter in given for factor in adapter[:2])]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [*(y.detach() for y in outputs), *gradients]


@each_function
@by_dtype
def test_results_and_gradients_are_those_of_the_matrix(
    kernel: ModuleType, name: str, of_x: torch.dtype, of_weight: torch.dtype, of_adapters: torch.dtype
) -> None:
    run, number, p = FUNCTIONS[name]
    x = torch.randn(2, ROWS, H, generator=torch.Generator().manual_seed(5)).to(of_x).npu()
    made = [Made(kernel, of_weight, seed) for seed in range(number)]
    given = adapters(kernel, of_adapters, number, p)
    call = partial(run, kernel)
    found = step(call, x, [each.given for each in made], given)
    assert {each.times for each in made} == {2}  # in the forward, and in the backward
    wide = [
        adapter._replace(**{side: getattr(adapter, side).detach().float().requires_grad_() for side in "ab"})
        for adapter in given
    ]
    exact = step(call, x.float(), [each.matrix.float() for each in made], wide)
    half = torch.bfloat16 in (of_x, of_weight, of_adapters)
    for one_found, one_exact in zip(found, exact):
        assert_near(one_found, one_exact, 2**-6 if half else 5e-6)  # as in test_lora_functions.py
    assert [each.dtype for each in found] == [of_x] * (number + 1) + [of_adapters] * 2 * number


@each_function
def test_nothing_keeps_what_was_made(kernel: ModuleType, name: str) -> None:
    run, number, p = FUNCTIONS[name]
    made = [Made(kernel, torch.bfloat16, seed) for seed in range(number)]
    kept: list[Tensor] = []
    x = torch.randn(ROWS, H).bfloat16().npu().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        run(kernel, x, [each.given for each in made], adapters(kernel, torch.float32, number, p))
    assert sum(tensor.dtype is torch.int8 for tensor in kept) == number
    assert not [tensor for tensor in kept if tensor.shape in ((N, H), (2 * N, H)) and tensor.dtype is not torch.int8]


@each_function
@by_dtype
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_computed_again_makes_it_for_the_backward_too(
    kernel: ModuleType,
    name: str,
    of_x: torch.dtype,
    of_weight: torch.dtype,
    of_adapters: torch.dtype,
    reentrant: bool,
) -> None:
    run, number, p = FUNCTIONS[name]
    x = torch.randn(2, ROWS, H, generator=torch.Generator().manual_seed(5)).to(of_x).npu()
    made = [Made(kernel, of_weight, seed) for seed in range(number)]
    given, weights = adapters(kernel, of_adapters, number, p), [each.given for each in made]

    def checkpointed(x: Tensor, **options: list) -> list[Tensor]:
        return checkpoint(lambda x: tuple(run(kernel, x, **options)), x, use_reentrant=reentrant)

    expected = step(partial(run, kernel), x, weights, given)
    for each in made:
        each.times = 0
    found = step(checkpointed, x, weights, given)
    assert {each.times for each in made} == {2}  # without that they would be made in the backward, too
    for mine, plain in zip(found, expected, strict=True):
        # the gradient of an input of several layers may be one product, which is rounded once
        assert_near(mine, plain, 2**-6 if torch.bfloat16 in (of_x, of_weight, of_adapters) else 1e-6)


@each_function
def test_a_weight_that_was_changed_since_is_an_error(kernel: ModuleType, name: str) -> None:
    run, number, p = FUNCTIONS[name]
    made = [Made(kernel, torch.bfloat16, seed) for seed in range(number)]
    x = torch.randn(ROWS, H).bfloat16().npu().requires_grad_()
    outputs = run(kernel, x, [each.given for each in made], adapters(kernel, torch.float32, number, p))
    made[0].packed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(y.sum() for y in outputs).backward()


def test_a_quantised_weight_is_multiplied_on_the_cpu(kernel: ModuleType) -> None:
    packed = torch.randint(-9, 9, (N, H), dtype=torch.int8)
    weight = kernel.QuantizedWeight(packed, lambda packed, out=None: packed.float(), (N, H), torch.float32)
    x, (a, b) = torch.randn(3, H), (torch.randn(4, H), torch.randn(N, 4))
    y = kernel.lora_linear(x, weight, None, [kernel.Adapter(a, b, 2.0)])
    assert_near(y, x.double() @ packed.double().t() + 2 * x.double() @ a.double().t() @ b.double().t())


def test_a_pair_of_a_quantised_weight_and_another_is_none(kernel: ModuleType) -> None:
    made, x = Made(kernel, torch.bfloat16, 0), torch.randn(ROWS, H).bfloat16().npu()
    first, second = adapters(kernel, torch.bfloat16, 2)
    assert kernel.lora_pair(x, [(made.given, None, first), (made.matrix, None, second)]) is None
