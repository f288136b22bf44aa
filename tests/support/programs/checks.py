"""What holds after every act: both sides compute the same, the report is true, and the same tensors share memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.nearness import TOLERANCE
from tests.support.programs.side import Side

# Of a norm, relative. float32: tests/support/nearness.py. Below it every product and sum on the way is rounded, on
# both sides: some steps of 2^-8 in bfloat16 and of 2^-11 in half, and as many again in gradients.
TOLERANCES = {torch.float64: TOLERANCE, torch.float32: TOLERANCE, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}
Values = dict[str, Tensor]
EXPLODED = 1e3  # logits whose loss is rounded, before exponents are taken of it, by more than the tolerance


class Computed(NamedTuple):
    """What a model computes, on the CPU."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    is_clear: bool

    @property
    def are_numbers(self) -> bool:
        """Whether nothing has overflowed or was divided by zero."""
        return all(bool(tensor.isfinite().all()) for tensor in (self.logits, *self.gradients.values()))


def tolerance(side: Side) -> float:
    """Return how far apart the sides may be: that of the coarsest dtype in the model."""
    return max(TOLERANCES[p.dtype] for _, p in side.parameters())


def computed(side: Side, margin: float) -> Computed:
    """Call a model, and differentiate its loss by whatever takes a gradient.

    `is_clear` says whether every router had its choice by more than a margin, and logits are of some size: otherwise
    rounding decides.
    """
    named = [(n, p) for n, p in side.model.named_parameters() if p.requires_grad]
    with _margins(side) as margins:
        result = side.run()
    gradients = {}
    if named and result.loss.requires_grad:
        found = torch.autograd.grad(result.loss, [p for _, p in named], allow_unused=True)
        gradients = {n: g.detach().cpu().double() for (n, _), g in zip(named, found) if g is not None}
    logits, loss = (tensor.detach().cpu().double() for tensor in (result.logits, result.loss))
    is_clear = all(m > margin for m in margins) and not logits.abs().max() > EXPLODED
    return Computed(logits, loss, gradients, is_clear)


@contextmanager
def _margins(side: Side) -> Iterator[list[float]]:
    """Note by how much routers prefer the experts that they choose."""
    found: list[float] = []

    def note(router: Any, args: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            bias = getattr(router, "bias", None)
            x = args[0].reshape(-1, args[0].shape[-1]).to(router.weight.dtype)
            logits = nn.functional.linear(x, router.weight, bias).float().sort(-1, descending=True).values
            if router.top_k < logits.shape[-1]:
                gap = logits[:, router.top_k - 1] - logits[:, router.top_k]
                found.append((gap.min() / logits.abs().max().clamp(min=1e-30)).item())

    routers = [m for _, m in side.named("Router")] if side.home == "cpu" else []
    handles = [router.register_forward_pre_hook(note) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to that of what is expected; the same infinities do not differ."""
    found, expected = found.cpu().double(), expected.cpu().double()
    found, expected = (each.masked_fill((found == expected) & found.isinf(), 0) for each in (found, expected))
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_equal_computed(found: Computed, expected: Computed, limit: float) -> None:
    """Compare what two models compute."""
    assert distance(found.logits, expected.logits) <= limit, "logits"
    assert distance(found.loss, expected.loss) <= limit, "loss"
    assert found.gradients.keys() == expected.gradients.keys()
    norms = [gradient.norm() for gradient in expected.gradients.values()]
    whole = max(torch.stack(norms).norm().item(), 1e-30) if norms else 1.0
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).norm().item() / whole <= 2 * limit, f"gradient of {name}"


def in_float64(side: Side) -> Computed | None:
    """Return what a model computes in float64; None where it cannot."""
    return _with_others(side, [*side.model.parameters(), *side.model.buffers()], lambda tensor: tensor.double())


def rounded_otherwise(side: Side) -> list[Computed]:
    """Return what a model computes from weights of which half are off by a rounding: what others may round apart."""
    rounds = (partial(_round_otherwise, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    found = (_with_others(side, [*side.model.parameters()], each) for each in rounds)
    return [one for one in found if one is not None and one.are_numbers]


def copied(model: nn.Module) -> nn.Module:
    """Copy a model, also one with tensors that its hooks computed, as torch's old `weight_norm` does at each call."""
    held = (x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor))
    return copy.deepcopy(model, {id(x): x.detach() for x in held if not x.is_leaf})


def _with_others(side: Side, tensors: list[Tensor], change: Callable[[Tensor], Tensor]) -> Computed | None:
    """Compute with other numbers in tensors, and put theirs back; a copy would lose what wraps a forward."""
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, data in zip(tensors, before):
            tensor.data = change(data) if data.is_floating_point() else data
        return computed(side, 0.0)
    except Exception:  # of whatever a user has put into it
        return None
    finally:
        for tensor, data in zip(tensors, before):
            tensor.data = data


def _round_otherwise(weight: Tensor, generator: torch.Generator) -> Tensor:
    one = torch.rand(weight.shape, generator=generator) < 0.5
    return weight * (1 + one.to(weight.dtype) * torch.finfo(weight.dtype).eps)


def is_as_near(found: Computed, others: Sequence[Computed], exact: Computed, limit: float) -> bool:
    """Tell whether a model is as near to float64 as others: within a limit, or four times the distance of one of them.

    A gradient may be a difference of large numbers: then all have lost its digits, each in an order of its own, and one
    of them may be near by luck.
    """
    if any(one.gradients.keys() != exact.gradients.keys() for one in (found, *others)):
        return False
    whole = torch.stack([exact.logits.new_zeros(()), *(g.norm() for g in exact.gradients.values())]).norm()

    def near(of: Callable[[Computed], Tensor], norm: Tensor) -> bool:
        furthest = max((of(other) - of(exact)).norm() for other in others)
        return bool((of(found) - of(exact)).norm() <= max(limit * norm, 4 * furthest))

    return (
        near(lambda c: c.logits, exact.logits.norm())
        and near(lambda c: c.loss, exact.loss.norm())
        and all(near(lambda c, name=name: c.gradients[name], whole) for name in exact.gradients)
    )


def assert_equal_members(found: Side, expected: Side, values: bool) -> bool:
    """Compare names, shapes, dtypes and flags of all tensors that the sides have, and their values where asked.

    Returns:
        Whether a value is another one, within its rounding.
    """
    ours, theirs = found.tensors(), expected.tensors()
    assert list(ours) == list(theirs)
    apart = 0.0
    for name, tensor in theirs.items():
        other = ours[name]
        mine, its = ((t.shape, t.dtype, t.requires_grad, isinstance(t, nn.Parameter)) for t in (other, tensor))
        assert mine == its, name
        if values and not other.is_meta and tensor.numel():
            error = distance(other.detach(), tensor.detach())
            assert error <= TOLERANCES.get(tensor.dtype, 0.0), name
            apart = max(apart, error)
    return apart > 0


def values(side: Side) -> dict[str, Tensor]:
    """Return the values of all floating tensors of a side, on the CPU."""
    found = side.tensors().items()
    return {name: t.detach().cpu().double() for name, t in found if t.is_floating_point() and not t.is_meta}


class Steps(NamedTuple):
    """How far weights have come in a step, all of them together, and how far two sides are apart.

    Attributes:
        change: the norm of what weights have changed by.
        apart: that of the difference.
        rounding: what the rounding of the weights themselves may be of it: twice, by the step of each side.
    """

    change: float
    apart: float
    rounding: float

    def are_equal(self, limit: float) -> bool:
        """Tell whether the sides agree to the tolerance of gradients."""
        return self.apart <= 2 * limit * self.change + self.rounding


def steps(found: Values, expected: Values, before: tuple[Values, Values], dtypes: dict[str, torch.dtype]) -> Steps:
    """Compare by how much the weights of a side have changed since ``before``; it keeps them in the dtypes."""
    changed = {name: value - before[1][name] for name, value in expected.items()}
    apart = [(found[name] - before[0][name] - change).norm() for name, change in changed.items()]
    rounded = [2 * torch.finfo(dtypes[name]).eps * value.norm() for name, value in expected.items()]
    norms = ([change.norm() for change in changed.values()], apart, rounded)
    return Steps(*(torch.stack(each).norm().item() for each in norms))


def assert_equal_aliases(found: Side, expected: Side) -> None:
    """Compare which tensors share bytes: no alias may be lost, and none made."""
    assert set(_overlaps(found)) == set(_overlaps(expected))


def _overlaps(side: Side) -> Iterator[tuple[str, str]]:
    by_storage: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for name, tensor in side.tensors().items():
        if tensor.numel() and not tensor.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            start = tensor.storage_offset() * tensor.element_size()
            end = start + (last + 1) * tensor.element_size()
            by_storage[tensor.untyped_storage().data_ptr()].append((name, start, end))
    for extents in by_storage.values():
        for index, (a, start, end) in enumerate(extents):
            yield from (tuple(sorted((a, b))) for b, s, e in extents[index + 1 :] if s < end and start < e)  # type: ignore[misc]


def follow(found: Side, expected: Side) -> None:
    """Give the twin the weights of the kernelized model, so that what rounding leaves does not add up."""
    theirs = expected.tensors()
    with torch.no_grad():
        for name, tensor in found.tensors().items():
            if tensor.is_floating_point() and not tensor.is_meta:
                theirs[name].data.copy_(tensor.detach())
