"""Run modules that may be routers on random numbers, in place of their own tensors too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.recognition.computed import NotRecognisedError
from kernels_ext_npu.recognition.module_settings import is_setting
from kernels_ext_npu.recognition.routers.formulas import Output, Router
from kernels_ext_npu.recognition.watched_runs import CLAMPS, Watched, is_close, run

_FACTORS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # where products have what is multiplied with the weight
_MANY = 2048  # rows, among which formulas differ that are not the same for most of them
_COMPARISONS = {"topk", "sort", "max", "amax"}
_OPERATORS = frozenset(
    {
        *(*CLAMPS, *_FACTORS, *_COMPARISONS, "_softmax", "gather", "scatter", "masked_fill", "where"),
        *("zeros", "zeros_like", "new_zeros", "new_ones", "full_like", "bitwise_not", "logical_not", "eq", "ne", "gt"),
    }
)


class WatchedRouter(Watched):
    """Lets topk sort what it gives, since nobody may rely on another order, and keeps the dtypes that decide."""

    def __init__(self) -> None:
        super().__init__(_OPERATORS)
        self.multiplied: list[torch.dtype] = []  # of what was multiplied with a matrix
        self.compared: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name == "topk":
            args, kwargs = args[:4], {**(kwargs or {}), "sorted": True}
        if name in _FACTORS:
            self.multiplied.append(args[_FACTORS[name]].dtype)
        elif name in _COMPARISONS:
            self.compared.add(args[0].dtype)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def tensor(self, result: Any) -> Any:
        """Return all that a forward returned."""
        if type(result) is not tuple:
            raise NotRecognisedError("it does not return experts and weights")
        return result


class _Linear(nn.Module):
    """Stands for a linear layer, and tells whether it was called."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.is_called = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_called = True
        return F.linear(x, self.weight, self.bias)


class RouterTrial:
    """A module that may be a router, and random tensors in place of its own.

    Args:
        module: the module.
        weight: the path of the matrix, which is ``[E, H]`` or, transposed, ``[H, E]``.
        is_transposed: whether it is.
        most: how many numbers it is wide at most, where any are said.
    """

    def __init__(self, module: nn.Module, weight: str, is_transposed: bool, most: int | None = None) -> None:
        self.module, self.weight, self.is_transposed = module, weight, is_transposed
        self.child = weight.rpartition(".")[0] or None  # the linear layer whose matrix it is; None if it is its own
        self.is_child_called = False  # by the last run
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        linear: Any = module._modules[self.child] if self.child else None
        if linear is not None:
            own |= {f"{self.child}.{each}": getattr(linear, each, None) for each in ("weight", "bias")}
        self.shapes = {name: (each.shape, each.dtype) for name, each in own.items() if each is not None}
        if linear is not None:  # a quantised layer has its matrix in other shapes
            self.shapes[weight] = torch.Size((linear.out_features, linear.in_features)), torch.float32
        self.experts, self.full_width = self.shapes[weight][0][:: -1 if is_transposed else 1]
        self.width = min(self.full_width, most or self.full_width)
        sized = [name for name, (shape, _) in self.shapes.items() if shape.numel() == self.experts]
        self.vectors = [name for name in sized if self.shapes[name][1].is_floating_point]  # a number for each expert
        self.tensors: dict[str, Tensor] = {}  # by their paths

    def draw_matrix(self, dtype: torch.dtype) -> None:
        """Draw a matrix of a dtype, and what is beside it."""
        made = torch.randn(self.experts, self.width, dtype=torch.float64) / math.sqrt(self.width)
        made[:, 0] = 1.0  # by the first number of x all logits of a token are moved
        self.tensors[self.weight] = (made.t() if self.is_transposed else made).to(dtype)
        self.draw_vectors()

    def draw_vectors(self, size: float = 1.0) -> None:
        """Draw other biases of some size, most of them below 0, as no score is."""
        for name, (shape, dtype) in self.shapes.items():
            if name == self.weight:
                continue
            drawn = size * (torch.randn(shape, dtype=torch.float64) - 1)
            self.tensors[name] = drawn if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
        if (bias := f"{self.child}.bias") in self.tensors:
            self.tensors[bias] = self.tensors[bias].to(self.tensors[self.weight].dtype)

    def draw(self, *tokens: int, size: float = 1.0, shift: float = 0.0) -> Tensor:
        """Draw numbers that give logits of some size."""
        x = size * torch.randn(*tokens, self.width, dtype=torch.float64)
        x[..., 0] += shift
        return x

    def draw_apart(self, router: Router, *tokens: int, **how: float) -> Tensor | None:
        """Draw numbers by which no expert is chosen by a hair; None if none are found."""
        x = self.draw(4 * math.prod(tokens), **how)
        return _repeated(x[are_apart(router, self.scores(router, x, self.tensors)[2], 1e-5, in_order=True)], tokens)

    def draw_telling(self, routers: list[Router], *tokens: int) -> Tensor | None:
        """Draw numbers by which some formulas choose other experts than others; None if none are found."""
        x = self.draw(_MANY, size=2.0)
        choices = [(router, self.scores(router, x, self.tensors)[2]) for router in routers]
        experts = [router.gating.choose(choice) for router, choice in choices]
        tells = torch.stack([(each != experts[0]).any(-1) for each in experts]).any(0)
        if not tells.any():
            return None
        return _repeated(
            x[tells & torch.stack([are_apart(*each, 1e-5, in_order=True) for each in choices]).all(0)], tokens
        )

    def scores(self, router: Router, x: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, scores and what is compared of a formula, in float64, a row for each token."""
        weight = tensors[self.weight].double()
        logits = F.linear(x.flatten(0, -2).double(), weight.t() if self.is_transposed else weight)
        logits = logits if router.offset is None else logits + tensors[router.offset].double().flatten()
        scores = router.gating.score(logits)
        choice = scores.detach()
        return logits, scores, choice if router.bias is None else choice + tensors[router.bias].detach().flatten()

    def run(
        self, x: Tensor, tensors: dict[str, Tensor], watch: WatchedRouter | None = None, training: bool = False
    ) -> Any:
        """Return what the forward returns for x and tensors in place of its own."""
        children: dict[str, Any] = {}
        if self.child:
            children[self.child] = _Linear(tensors[self.weight], tensors.get(f"{self.child}.bias"))
        watch = watch or WatchedRouter()
        result = run(self.module, x, tensors=tensors, children=children, training=training, watch=watch)
        self.is_child_called = any(child.is_called for child in children.values())
        return result


def _repeated(rows: Tensor, tokens: tuple[int, ...]) -> Tensor | None:
    """Return rows for some tokens, each as often as it takes; None if there are none."""
    return rows[torch.arange(math.prod(tokens)) % len(rows)].view(*tokens, -1) if len(rows) else None


def are_apart(router: Router, choice: Tensor, eps: float, in_order: bool = False) -> Tensor:
    """Tell for each token whether numbers that differ by some eps choose the same experts."""

    def choose(choice: Tensor) -> Tensor:
        experts = router.gating.choose(choice)
        return experts if in_order else experts.sort().values

    noises = [1 + 4 * eps * torch.randn_like(choice) for _ in range(4)]
    return torch.stack([(choose(choice * noise) == choose(choice)).all(-1) for noise in noises]).all(0)


def read_weights(value: Tensor, experts: Tensor) -> tuple[str, Tensor] | None:
    """Return what a value is, and the weights of chosen experts in it; None if it has others that are not 0."""
    if value.shape == experts.shape:
        return "weights", value
    index = experts.long()
    return None if value.scatter(-1, index, 0.0).any() else ("spread", value.gather(-1, index))


def read_output(value: Any, tokens: torch.Size, known: str | None, others: dict[str, Tensor]) -> Output | None:
    """Return what a value is that a router returns for some tokens; None if it is nothing that a kernel has."""
    if not isinstance(value, Tensor):
        return Output("constant", value=value) if is_setting(value) else None
    if value.numel() == 1 and not value.any():
        return Output("zero", value=value.shape)
    if value.shape[:-1] not in (tokens, (tokens.numel(),)):
        return None
    is_float = value.is_floating_point()
    found = (name for name, each in others.items() if is_float and is_close(value.flatten(0, -2), each))
    name = known or next(found, None)
    return None if name is None else Output(name, value.dim() == 2)
