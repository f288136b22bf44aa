"""Routers that are found by running them: what they multiply, how they choose experts and weigh them, how they round.

A module is tried that has one matrix, or one linear layer, and returns experts and as many weights for each token. The
logits are what it multiplies with the matrix. Scores, division and scale are read off the weights, bias and groups off
the experts; then that has to hold at other magnitudes, for derivatives, and in 16 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.recognition.computed import Computed, NotRecognised, NotRecognisedError
from kernels_ext_npu.recognition.module_settings import is_config, is_linear, is_opaque, names_read, numbers
from kernels_ext_npu.recognition.routers.formulas import Gating, Output, Router, spread
from kernels_ext_npu.recognition.routers.roundings import DTYPES, find_dtypes
from kernels_ext_npu.recognition.routers.trials import RouterTrial, read_output, read_weights
from kernels_ext_npu.recognition.watched_runs import (
    ANYTHING,
    are_same,
    attempt,
    check_sizes,
    is_close,
    taken_shapes,
    takes,
)

_TOP_K = re.compile("top_?k")
_CHOOSING = re.compile("top_?k|sort|max")  # in the names that a forward reads which chooses
_CALLED_SO = re.compile("Router$|Gat(e|ing)$")
_MOST_NUMBERS = 1 << 16  # of a tensor beside the matrix: others are no biases
_WIDTH = 64  # of x, for a start: many forwards take any
_SIZES = (0.1, 1.0, 4.0, 30.0)  # of logits: at the last one most scores are 0 or 1
_BIASES = (1.0, 0.1, 0.01)  # sizes, as scores are near to 1 or to one of hundreds
# how far logits are moved: until their scores are as small as an eps, or as limits show
_SHIFTS = {"sigmoid": (-20.0, -46.0, -80.0), "softmax": (100.0, -100.0)}
_SHIFTED = 1e-4  # by as much logits of a hundred are off in float32, and so are their exponentials
_OTHER_ORDER = "it gives experts in another order than that of their scores"
_ZERO_FILLED = "it fills groups that are not chosen with 0, and the operator leaves them out: a negative bias tells"


def find_router(module: nn.Module) -> Computed | None:
    """Return how a router chooses; why no kernel does so, of one that is called so or returns experts and weights."""
    held = module._parameters.items()
    own = [name for name, each in held if each is not None and each.dim() == 2 and each.numel() > max(each.shape)]
    children = [name for name, child in module._modules.items() if is_opaque(child)]
    names = names_read(type(module), type(module).forward)  # type: ignore[arg-type]
    if not any(map(_CHOOSING.search, names)) or not takes(module, 1):
        return None  # a module may be there for what else it does, and is not run for a try
    tensors = {**module._parameters, **module._buffers}.items()
    if any(each is not None and each.numel() > _MOST_NUMBERS for name, each in tensors if name not in own):
        return None
    if len(own) + len(children) != 1 or not all(is_linear(module._modules[name]) for name in children):
        return None
    refused, is_called_so = None, _CALLED_SO.search(type(module).__name__) and any(map(_TOP_K.search, names))
    for is_transposed, width in product((False,) if children else (False, True), (_WIDTH, None)):
        search = _Search(module, own[0] if own else f"{children[0]}.weight", is_transposed, width)
        seen: list[NotRecognised] = []
        if (found := attempt(search.find, seen=seen)) is not None:  # or it is given a matrix that lies the other way
            return found
        if seen and (search.routes or is_called_so):
            refused = refused or Reason("unknown", f"no kernel computes what its forward computes: {seen[0].seen}")
    return None if refused is None else Computed("SoftmaxTopKRouter", refused=refused)


class _Search:
    """The search for how a module routes."""

    def __init__(self, module: nn.Module, weight: str, is_transposed: bool, most: int | None) -> None:
        self.trial = RouterTrial(module, weight, is_transposed, most)
        self.routes = False  # whether it was seen to return experts and weights
        configs = [vars(value) for value in vars(module).values() if is_config(value)]
        written = numbers(module) | {n for config in configs for n in config.values() if type(n) in (int, float)}
        self.numbers = sorted(n for n in written if 0 < abs(n) < 1e9)

    def find(self) -> Computed | None:
        """Return how it chooses; None if it takes other arguments, or returns no experts and weights.

        Raises:
            NotRecognisedError: it chooses in another way.
        """
        trial = self.trial
        for dtype in (torch.float64, torch.float32):  # some cast x to float32, and no weight
            trial.draw_matrix(dtype)
            if shapes := taken_shapes(lambda *tokens: trial.run(trial.draw(*tokens), trial.tensors)):
                break
        if not shapes:
            return None
        # some take others and mean nothing by it
        shapes = [each for each in shapes if self._places(x := trial.draw(*each), trial.run(x, trial.tensors))]
        if not shapes:
            raise NotRecognisedError("it does not return experts, and as many weights, for each token")
        self.routes, first = True, shapes[0]
        x = trial.draw(8 * first[0], *first[1:])
        result = trial.run(x, trial.tensors)
        routers = list(self._weighing(x, result))
        if not routers:
            raise NotRecognisedError("its weights are no softmax or sigmoid of what it multiplies with its matrix")
        routers = list(self._choosing(x, result, routers))
        for size, bias in product(_SIZES, _BIASES if trial.vectors else (0,)):
            trial.draw_vectors(bias)
            routers = self._agreeing(routers, trial.draw_telling(routers, *first))
            routers = self._agreeing(routers, trial.draw_apart(routers[0], *first, size=size))
        for shift in _SHIFTS[routers[0].gating.scores]:
            routers = self._agreeing(routers, trial.draw_apart(routers[0], *first, shift=shift), _SHIFTED)
        for tokens in (*shapes[1:], [1 for _ in first]):
            routers = self._agreeing(routers, trial.draw_apart(routers[0], *tokens))
        router = routers[0]
        if trial.width < trial.full_width:
            self.trial = RouterTrial(trial.module, trial.weight, trial.is_transposed)
            self.trial.draw_matrix(dtype)
            self._agreeing(routers, self.trial.draw_apart(router, *first))
            self.trial = trial
        wide = {name: each.float() if each.is_floating_point() else each for name, each in trial.tensors.items()}
        check_sizes(lambda given: trial.run(given, wide), *(5, 7, 11)[: len(first)], trial.width)
        router = router._replace(
            child=trial.child if trial.is_child_called else None,
            dims=tuple({len(tokens) + 1 for tokens in shapes}),
            dtypes=tuple(filter(None, (find_dtypes(trial, router, len(first), *each) for each in DTYPES))),
            has_gradient=self._computes_so(router, *first, with_grad=True),
            trains=all(self._computes_so(router, *first, with_grad=each, training=True) for each in (False, True)),
        )
        if not router.dtypes:
            raise NotRecognisedError("it rounds in another way")
        return Computed(_layer(router), router=router, casts=False)

    def _places(self, x: Tensor, result: tuple[Any, ...]) -> tuple[int, list[int]] | None:
        """Return where in a result its experts are, and what may be their weights; None if it has not one of each."""
        tensors = {place: each for place, each in enumerate(result) if isinstance(each, Tensor) and each.dim()}
        whole = [place for place, each in tensors.items() if each.dtype in (torch.int64, torch.int32)]
        if len(whole) != 1 or tensors[whole[0]].shape[:-1] not in (x.shape[:-1], (x.shape[:-1].numel(),)):
            return None
        *rows, k = tensors[whole[0]].shape
        shapes = (*rows, k), (*rows, self.trial.experts)
        alike = [place for place, each in tensors.items() if each.is_floating_point() and each.shape in shapes]
        return (whole[0], alike) if alike else None

    def _weighing(self, x: Tensor, result: tuple[Any, ...]) -> Iterator[Router]:
        """Yield what may weigh the chosen experts so."""
        trial, tokens = self.trial, x.shape[:-1]
        if (places := self._places(x, result)) is None:
            return
        whole, alike = places
        experts = result[whole]
        divisions = [(False, 0.0), *((True, epsilon) for epsilon in (0.0, *self.numbers) if 0 <= epsilon < 1)]
        scored = product(alike, (None, *trial.vectors), ("softmax", "sigmoid"))
        for place, offset, name in scored:
            gating = Gating(experts.shape[-1], name)
            router = Router(gating, trial.weight, trial.is_transposed, offset=offset)
            logits, scores, _ = trial.scores(router, x, trial.tensors)
            if (found := read_weights(result[place], experts)) is None:
                continue
            names = {whole: "experts", place: found[0]}
            others = {"logits": logits, "scores": scores}
            outputs = [read_output(each, tokens, names.get(i), others) for i, each in enumerate(result)]
            for renormalise, epsilon in divisions if None not in outputs else ():
                divided = gating._replace(renormalise=renormalise, epsilon=epsilon)
                weights, expected = found[1].flatten(0, -2), divided.weigh(scores, experts.flatten(0, -2))
                scale = float((weights / expected).median())
                near = [n for n in (1.0, *self.numbers, float(f"{scale:.3g}")) if math.isclose(n, scale, rel_tol=1e-5)]
                if near and is_close(weights, scale * expected):
                    yield router._replace(gating=divided._replace(scale=float(near[0])), outputs=tuple(outputs))  # type: ignore[arg-type]

    def _grouped(self, routers: list[Router]) -> Iterator[Router]:
        """Yield formulas that weigh so, with each bias and each way to group that numbers of the module allow."""
        whole = [int(n) for n in self.numbers if n == int(n) and 0 < n < self.trial.experts]
        pairs = [(groups, top) for groups, top in permutations(whole, 2) if top < groups]
        groupings = [(1, 1, "best"), *((*pair, how) for pair in pairs for how in ("best", "two best"))]
        for router, bias, (groups, top_groups, how) in product(routers, (None, *self.trial.vectors), groupings):
            gating = router.gating._replace(groups=groups, top_groups=top_groups, group_scores=how)
            if gating.fits(self.trial.experts) and (bias is None or bias != router.offset):
                yield router._replace(gating=gating, bias=bias)

    def _choosing(self, x: Tensor, result: tuple[Any, ...], routers: list[Router]) -> Iterator[Router]:
        """Yield what may choose experts so, of what may weigh them so."""
        found, is_other_order, is_known = _found(routers[0], result, "experts"), False, False
        for router in self._grouped(routers):
            experts = router.gating.choose(self.trial.scores(router, x, self.trial.tensors)[2])
            if torch.equal(experts, found):
                is_known = True
                yield router
            is_other_order |= torch.equal(experts.sort().values, found.sort().values)
        if not is_known:
            raise NotRecognisedError(_OTHER_ORDER if is_other_order else self._why_not(routers, x, result))

    def _agreeing(self, routers: list[Router], x: Tensor | None, limit: float | None = None) -> list[Router]:
        """Return what computes the same of other numbers, if there are any."""
        if x is None:
            return routers
        x, tensors, result = self._run_for_derivatives(x, False)
        agreeing = [router for router in routers if self._agrees(router, x, tensors, result, limit)]
        if not agreeing:
            raise NotRecognisedError(self._why_not(routers, x, result))
        return agreeing

    def _why_not(self, routers: list[Router], x: Tensor, result: tuple[Any, ...]) -> str:
        """Return what is otherwise in a result than in that of some formulas, of which it seemed to be."""
        experts = _found(routers[0], result, "experts")
        weights = _found(routers[0], result, "weights", "spread")
        weights = weights if weights.shape == experts.shape else weights.gather(-1, experts)
        if not any(
            is_close(weights, r.gating.weigh(self.trial.scores(r, x, self.trial.tensors)[1], experts)) for r in routers
        ):
            return "it weighs in another way at other numbers"
        fills = any(
            _fills_with_0(r.gating, self.trial.scores(r, x, self.trial.tensors)[2], experts)
            for r in self._grouped(routers)
        )
        return _ZERO_FILLED if fills else "it does not choose the experts with the largest scores"

    def _computes_so(self, router: Router, *tokens: int, with_grad: bool, training: bool = False) -> bool:
        """Tell whether it computes the same, and its derivatives are, where a gradient is asked for or in training."""
        try:
            for size in _SIZES[:-1]:
                x = self.trial.draw_apart(router, *tokens, size=size)
                if x is None or not self._agrees(router, *self._run_for_derivatives(x, with_grad, training)):
                    return False
        except ANYTHING:  # some assert that they are not trained, or write over what a derivative needs
            return False
        return True

    def _run_for_derivatives(self, x: Tensor, with_grad: bool, training: bool = False) -> tuple[Any, ...]:
        """Return x and tensors that may require gradients, and what is returned for them."""
        own = {name: each.clone() for name, each in self.trial.tensors.items()}
        x = x.clone()
        for each in (x, *own.values()):
            each.requires_grad_(with_grad and each.is_floating_point())
        with torch.set_grad_enabled(with_grad):
            return x, own, self.trial.run(x, own, training=training)

    def _agrees(
        self, router: Router, x: Tensor, tensors: dict[str, Tensor], result: Any, limit: float | None = None
    ) -> bool:
        """Tell whether a result is that of a formula, and its derivatives; or the values alone, but for some limit."""
        if len(result) != len(router.outputs):
            return False
        with torch.set_grad_enabled(x.requires_grad):
            logits, scores, choice = self.trial.scores(router, x, tensors)
            experts = router.gating.choose(choice)
            weights = router.gating.weigh(scores, experts)
            made = {"logits": logits, "scores": scores, "weights": weights, "spread": spread(weights, experts, logits)}
            result = [each.flatten(0, -2) if output.is_row else each for output, each in zip(router.outputs, result)]
        arguments = [x, *(tensors[name] for name in (router.weight, router.offset) if name is not None)]

        def is_same(output: Output, found: Any) -> bool:
            if output.what == "constant":
                return type(found) is type(output.value) and found == output.value
            if output.what == "zero":
                return found.shape == output.value and not found.requires_grad and not found.any()
            if output.what == "experts":
                return torch.equal(found, experts.to(found.dtype))
            expected = made[output.what]
            return are_same(found, expected, arguments) if limit is None else is_close(found, expected, limit)

        return all(map(is_same, router.outputs, result))


def _found(router: Router, result: tuple[Any, ...], *names: str) -> Tensor:
    """Return one of the tensors that a router returns, with a row for each token."""
    return next(each.flatten(0, -2) for each, output in zip(result, router.outputs) if output.what in names)


def _fills_with_0(gating: Gating, choice: Tensor, found: Tensor) -> bool:
    """Tell whether experts are the best ones if those of other groups count as 0."""
    filled = gating.limit(choice, 0.0)
    return gating.groups > 1 and is_close(filled.gather(-1, found), filled.topk(gating.k).values)


def _layer(router: Router) -> str:
    """Return the layer of transformers' routers that is told to choose so."""
    if router.gating.scores == "sigmoid":
        return "SigmoidTopKRouterUnbiased" if router.bias is None else "SigmoidTopKRouter"
    if router.gating.groups > 1:
        return "GroupedSoftmaxTopKRouter"
    return "SoftmaxTopKRouter" if router.bias is None else "BiasedSoftmaxTopKRouter"
