"""Norms that are found by running them: their layer, their eps, and which parameter is weight and bias."""

from __future__ import annotations

from itertools import permutations, product

import torch
from torch import Tensor, nn

from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.recognition.computed import Computed, NotRecognised, NotRecognisedError
from kernels_ext_npu.recognition.module_settings import names_read, numbers
from kernels_ext_npu.recognition.norms.formulas import KINDS, Kind, Rounding, Terms
from kernels_ext_npu.recognition.watched_runs import (
    ANYTHING,
    CLAMPS,
    MAGNITUDES,
    ROUNDINGS,
    Watched,
    are_same,
    attempt,
    check_sizes,
    is_close,
    run,
    taken_shapes,
    takes,
)

_MEANS = {"mean", "sum", "norm", "vector_norm", "rms_norm", "var", "var_mean", "std", "layer_norm", "einsum"}
_TORCHS = torch.finfo(torch.float64).eps  # what torch's rms_norm takes in float64 if it is given no eps
_LEAST_LENGTH = 1e-12  # torch's default: what is as short is a zero that was rounded
_CASTS = {"to", "_to_copy"}
_IN_ONE_OPERATOR = {"native_layer_norm"}
# what norms are seen to do that none does which is known, each farther on than the one before
_OTHER_MEAN = "its numbers are those of no known norm over the last dimension with an eps inside the root"
_OTHER_NUMBERS = "its gradients, or its numbers at some magnitude, are those of no known norm"
_OTHER_CALLS = "it takes what no norm takes"
_OTHER_LIMITS = "it limits lengths in another way"
_OTHER_ROUNDINGS = "it rounds where no kernel does"
_SEEN = (_OTHER_MEAN, _OTHER_NUMBERS, _OTHER_CALLS, _OTHER_LIMITS, _OTHER_ROUNDINGS)
_ONE_ALREADY = "torch's layer norm is one operator already"
_DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
]


def find_norm(module: nn.Module) -> Computed | None:
    """Return the layer of a norm, its eps and the names of its parameters."""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    shape = next((parameter.shape for parameter in own.values()), None)
    if not own and _MEANS.isdisjoint(names_read(type(module), type(module).forward)):  # type: ignore[arg-type]
        return None  # a module without numbers of its own may be there for what else it does, and is not run for a try
    if shape is not None and (not shape or shape.numel() != shape[-1]):  # of others than numbers of the last dimension
        return None
    if any(p.shape != shape or not p.is_floating_point() for p in own.values()):
        return None
    held = [value[-1] if isinstance(value, tuple) and value else value for value in vars(module).values()]
    lengths = [value for value in held if type(value) is int and 1 < value <= 1 << 16]
    width = shape.numel() if shape is not None else next(iter(lengths), 64)
    groups = {n for length in lengths for n in (length, width // length) if n and width % n == 0 and n < width}
    seen: list[NotRecognised] = []
    for is_gated in (True, False):
        if takes(module, 1 + is_gated):
            for names, kind in product(permutations(own), KINDS.get((len(own), is_gated), ())):
                for size in (None, *(groups if kind.has_groups else ())):
                    found = attempt(_Norm(module, kind, names, width, size, is_gated).find, seen=seen)
                    if found is not None:
                        return found
    if seen:  # of several kinds the one that it is nearest to
        places = {each: place for place, each in enumerate((*_SEEN, None, _ONE_ALREADY))}
        nearest = max(seen, key=lambda each: places.get(each.seen, len(_SEEN)))
        raise NotRecognisedError(nearest.seen, NORMS if nearest.seen in _SEEN[1:] else None)
    return None


class _Norm:
    """A module that may be a norm of a kind."""

    def __init__(
        self, module: nn.Module, kind: Kind, names: tuple[str, ...], width: int, size: int | None, is_gated: bool
    ) -> None:
        self.module, self.kind, self.names, self.width = module, kind, names, width
        self.size, self.is_gated = size, is_gated
        self.watch = Watched(CLAMPS)
        self.weight_dtype = torch.float64
        self.eps: float | None = 0.0
        self.dims = max((module._parameters[name].dim() for name in names), default=1)  # type: ignore[union-attr]

    def run(self, terms: Terms, training: bool = False) -> Tensor:
        shapes = {name: self.module._parameters[name].shape[:-1] for name in self.names}  # type: ignore[union-attr]
        own = {name: each.view(*shapes[name], -1) for name, each in zip(self.names, terms[2:4])}
        arguments = (terms.x, terms.gate) if self.is_gated else (terms.x,)
        return run(self.module, *arguments, tensors=own, training=training, watch=self.watch)

    def draw(self, *tokens: int, magnitude: float = 1.0) -> Terms:
        x, gate, *affine = (torch.randn(*tokens, self.width, dtype=torch.float64) for _ in range(4))
        weight, bias = (each.flatten()[: self.width] for each in affine)
        count = len(self.names)
        weights = weight if count else None, bias if count > 1 else None
        terms = Terms(magnitude * x, gate if self.is_gated else None, *weights, self.size)
        return _cast(terms, torch.float64, self.weight_dtype)

    def _norm(self, *tokens: int) -> None:
        """Norm random numbers; raise an error if another shape comes out."""
        terms = self.draw(*tokens)
        if self.run(terms).shape != terms.x.shape:
            raise ValueError("it gives another shape")

    def find(self) -> Computed:
        """Return what it computes.

        Raises:
            NotRecognisedError: it does what no norm does that is known, or calls torch's own layer norm alone.
        """
        for self.weight_dtype in (torch.float64, torch.float32):  # torch's layer norm wants those of what was cast
            if taken := taken_shapes(self._norm):
                break
        if all(len(tokens) > 1 for tokens in taken):  # rows alone would get a dimension more
            self.dims = max(self.dims, 3)
        first, *shapes = (tokens for tokens in taken if len(tokens) + 1 >= self.dims)
        eps = self._solve_eps(first)
        if eps is None:
            raise NotRecognisedError(_OTHER_MEAN)
        self.eps = eps = None if eps == _TORCHS else eps
        probes = [self.draw(*first, magnitude=each) for each in (1e-3, *MAGNITUDES)]
        probes += [self.draw(*tokens) for tokens in (*shapes, [1 for _ in first])]
        for probe, training, with_grad in product(probes, (False, True), (False, True)):
            terms = probe.map(lambda each, _, needs_grad=with_grad: each.clone().requires_grad_(needs_grad))  # type: ignore[misc]
            with torch.set_grad_enabled(with_grad):
                if not are_same(self.run(terms, training), self.kind.exact(terms, eps), terms.tensors):
                    raise NotRecognisedError(_OTHER_NUMBERS)
        others = [probes[-1]._replace(gate=None)] if self.is_gated else []
        if not self.names:  # whose length would say for which width it is
            others.append(Terms(torch.randn(*first, 2 * self.width, dtype=torch.float64)))
        if not all(map(self._refuses_or_norms, others)):
            raise NotRecognisedError(_OTHER_CALLS)
        sizes = *(5, 7, 11)[: len(first)], self.width
        wide = _cast(probes[1], torch.float32, torch.float32)
        check_sizes(lambda given: self.run(wide._replace(x=given, gate=given if self.is_gated else None)), *sizes)
        if set(self.watch.called) <= _IN_ONE_OPERATOR:
            raise NotRecognisedError(_ONE_ALREADY)
        if not CLAMPS.isdisjoint(self.watch.called):
            self.eps = self._eps_of_least_length(first)
            if self.eps is None:
                raise NotRecognisedError(_OTHER_LIMITS)
        # numbers at which an eps shows that depends on the dtype
        magnitudes = (1.0, 1e-3) if eps is None else (1.0,)
        drawn = [(self.draw(*first[:-1], 32, magnitude=each), dtypes) for dtypes in _DTYPES for each in magnitudes]
        terms = [_cast(each, *dtypes) for each, dtypes in drawn]
        given = [each for each in terms if self._is_taken(each)]
        alike = [each for each in given if len({t.dtype for t in each.tensors}) == 1]
        for several, judge, rounding in product(
            (given, alike), (self._rounds_alike, self._rounds_more), self.kind.roundings
        ):
            if several and all(judge(rounding, each) for each in several):
                return self._computed(rounding, len(several) < len(given))
        raise NotRecognisedError(_OTHER_ROUNDINGS)

    def _computed(self, rounding: Rounding, wants_one_dtype: bool) -> Computed:
        sizes = () if self.size is None else (("group_size", self.size),)
        return Computed(
            rounding.layer,
            parameters=tuple(zip(("weight", "bias"), (*self.names, None, None))),
            numbers=(("variance_epsilon", self.eps), *self.kind.numbers, *sizes),
            casts_back=rounding.casts_back,
            dims=self.dims,
            wants_one_dtype=wants_one_dtype,
            casts=not _CASTS.isdisjoint(self.watch.called),
            returned=self.watch.returned,
        )

    def _solve_eps(self, tokens: tuple[int, ...]) -> float | None:
        """Return the eps: solved for from what it gives of small numbers, and then read where it is written."""
        candidates: set[float] | None = None
        known = {0.0, torch.finfo(torch.float32).eps, _TORCHS, *numbers(self.module, float)}
        for magnitude in (1e-3, 1e-6, 1e-9):
            terms = self.draw(*tokens, magnitude=magnitude)
            terms = terms._replace(bias=None if terms.bias is None else torch.zeros_like(terms.bias))
            inner = self.kind.inner(terms)
            expected, found = self.kind.scale(terms) * inner, self.run(terms)
            if self.size is not None:
                expected, found, inner = (each.unflatten(-1, (-1, self.size)) for each in (expected, found, inner))
            factor = (expected * found).sum(-1, keepdim=True) / expected.square().sum(-1, keepdim=True)
            if not is_close(found, factor * expected, 1e-4):  # another mean, or not the last dimension
                return None
            mean = inner.square().mean(-1, keepdim=True)
            solved = float((factor.pow(-2) - mean).mean())
            near = {n for n in {*known, max(0.0, float(f"{solved:.3g}"))} if abs(n - solved) <= 1e-4 * (n + mean.max())}
            candidates = near if candidates is None else candidates & near
        return min(candidates) if candidates else None

    def _eps_of_least_length(self, tokens: tuple[int, ...]) -> float | None:
        """Return the eps in place of the length that vectors have at the least, as torch's normalize() has it.

        What is shorter by far is divided by that, and by the root of the eps, alike; a length near it is not seen.
        """
        terms, before = self.draw(*tokens, magnitude=1e-20), len(self.watch.called)
        found, expected = self.run(terms), self.kind.scale(terms) * self.kind.inner(terms)
        clamps = sum(name in CLAMPS for name in self.watch.called[before:])
        factor = float((found / expected).mean())  # one for all rows: without a limit each has its own
        if clamps != 1 or self.eps != 0 or self.size is not None or not is_close(found, factor * expected, 1e-4):
            return None
        eps = factor**-2
        return eps if eps * self.width <= 1.01 * _LEAST_LENGTH**2 else None

    def _refuses_or_norms(self, terms: Terms) -> bool:
        """Tell whether it refuses to do without a gate, or for another width, or norms then."""
        try:
            found = self.run(terms)
        except NotRecognisedError:
            return False
        except ANYTHING:
            return True
        return is_close(found, self.kind.exact(terms, self.eps))

    def _is_taken(self, terms: Terms) -> bool:
        """Tell whether torch takes what it computes in some dtypes: layer norms want one for all."""
        try:
            self.run(terms)
        except RuntimeError:
            return False
        return True

    def _rounds_alike(self, rounding: Rounding, terms: Terms) -> bool:
        """Tell whether it gives the dtype and the bits that a layer gives: sums in another order change few of them."""
        found, expected = self.run(terms), self.kind.rounded(rounding, terms, self.eps)
        if found.dtype is torch.float32 or found.dtype is not expected.dtype:
            return found.dtype is expected.dtype and is_close(found, expected)
        return bool((found != expected).float().mean() < 0.01)

    def _rounds_more(self, rounding: Rounding, terms: Terms) -> bool:
        """Tell whether it gives the dtype of a layer, and is no nearer to the truth, as it rounds more often."""
        found, expected = self.run(terms), self.kind.rounded(rounding, terms, self.eps)
        if found.dtype is not expected.dtype:
            return False
        truth = self.kind.exact(_cast(terms, torch.float64, torch.float64), self.eps)
        ulp = max(torch.finfo(each.dtype).eps for each in terms.tensors)
        theirs, ours = ((each.double() - truth).norm() for each in (found, expected))
        return is_close(found, truth, ROUNDINGS * ulp) and bool(ours <= theirs + ulp / 2 * truth.norm())


def _cast(terms: Terms, dtype: torch.dtype, weight_dtype: torch.dtype) -> Terms:
    return terms.map(lambda each, name: each.to(dtype if name in ("x", "gate") else weight_dtype))
