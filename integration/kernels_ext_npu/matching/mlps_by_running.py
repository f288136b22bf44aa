"""Gated MLPs that are found by running them: their layer, and which projection is gate, up and down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.matching.module_settings import is_projection
from kernels_ext_npu.matching.watched_runs import MAGNITUDES, are_same, check_sizes, stand_in, takes_one_tensor
from kernels_ext_npu.matching.watched_runs import run as run_forward


class _Leaf(nn.Module):
    """Stands for a linear layer: it gives random numbers, and keeps them and what it was given."""

    def __init__(self, width: int, magnitude: float) -> None:
        super().__init__()
        self.base, self.slope = magnitude * torch.randn(2, width, dtype=torch.float64)
        self.seen: list[Tensor] = []
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        result = (self.base + self.slope * x[..., :1]).to(x.dtype)  # others for each token
        self.given.append(result.requires_grad_(torch.is_grad_enabled()))
        return result


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SwiGLUMLP": F.silu,
    "GeGLUMLP": lambda x: F.gelu(x, approximate="tanh"),
    "ExactGeGLUMLP": F.gelu,
}


def find_gated_mlp(module: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Return the layer of a gated MLP, and its projections: gate and up may be halves of one."""
    linear: dict[str, Any] = {name: child for name, child in module._modules.items() if is_projection(child)}
    others = [child for name, child in module._modules.items() if name not in linear and child is not None]
    own = [*module._parameters.values(), *(parameter for child in others for parameter in child.parameters())]
    if len(linear) not in (2, 3) or any(each is not None for each in own) or not takes_one_tensor(module):
        return None
    width = next(iter(linear.values())).in_features

    def run(x: Tensor, magnitude: float = 1.0, training: bool = False) -> tuple[dict[str, _Leaf], Tensor]:
        leaves = {name: _Leaf(child.out_features, magnitude) for name, child in linear.items()}
        children: dict[str, Any] = {**module._modules, **leaves}
        for name in children.keys() - leaves.keys():
            children[name] = children[name] and stand_in(children[name], {"training": training})
        return leaves, run_forward(module, {"_modules": children, "training": training}, x)

    x = torch.randn(2, 3, width, dtype=torch.float64)
    found: set[tuple[Any, ...]] | None = None
    for given, magnitude, training, with_grad in product((x, x[0]), MAGNITUDES, (False, True), (False, True)):
        with torch.set_grad_enabled(with_grad):
            roles = set(_find_roles(*run(given, magnitude, training), given))
        found = roles if found is None else found & roles
    for dtype in (torch.bfloat16, torch.float16):  # a forward may ask for the dtype
        given = x.to(dtype)
        found = found and found & set(_find_roles(*run(given), given))
    if not found or len(found) > 1:
        return None
    check_sizes(lambda given: run(given)[1], width)
    ((layer, gate, up, down),) = found
    if gate == up:
        return f"Fused{layer}", (("gate_up_proj", gate), ("down_proj", down))
    return layer, (("gate_proj", gate), ("up_proj", up), ("down_proj", down))


def _find_roles(leaves: dict[str, _Leaf], y: Tensor, x: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield how projections make a gated MLP: the layer, the names of gate, up and down.

    Gate and up may be halves of one, the gate first, as the operators take them.
    """
    down = next(name for name, leaf in leaves.items() if leaf.given and leaf.given[0] is y)
    ins = {name: leaf.given[0] for name, leaf in leaves.items() if name != down and leaf.seen[0] is x}
    if len(ins) + 1 < len(leaves) or any(len(leaf.seen) != 1 for leaf in leaves.values()):
        return
    for gate, up in permutations(ins) if len(ins) == 2 else ((*ins, *ins),):
        first, second = (ins[gate], ins[up]) if gate != up else ins[gate].chunk(2, -1)
        for layer, activation in _ACTIVATIONS.items():
            if are_same(leaves[down].seen[0], activation(first) * second, [*ins.values()]):
                yield layer, gate, up, down
