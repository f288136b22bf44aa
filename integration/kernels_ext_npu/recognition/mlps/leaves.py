"""What stands for the children of an MLP while it is run, and for the dropouts that it calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kernels_ext_npu.recognition.module_settings import is_linear
from kernels_ext_npu.recognition.stand_ins import filled, stand_in
from kernels_ext_npu.recognition.watched_runs import attempt, casts


class Call:
    """One call of a child: its name, or a rate, what it was given and what it gave."""

    def __init__(self, name: Any, seen: Tensor, given: Tensor) -> None:
        self.name, self.seen, self.given = name, seen, given


class Leaf(nn.Module):
    """Stands for a child that is called: it gives random numbers, and keeps them and what it was given."""

    def __init__(self, noise: Tensor, child: nn.Module | None = None, sizes: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.noise, self.child = noise, child  # None is a call of torch's dropout
        self.sizes = sizes  # without, it keeps the width of its argument
        self.seen: list[Tensor] = []
        self.given: list[Tensor] = []
        self.is_cast = False  # whether autocast was on when it was called

    def forward(self, x: Tensor) -> Tensor:
        takes, gives = self.sizes or (x.shape[-1], x.shape[-1])
        if x.shape[-1] != takes:
            raise ValueError(f"it takes {takes} values, and is given {x.shape[-1]}")
        self.seen.append(x)
        self.is_cast = all(casts())
        base, slope = self.noise[:, :gives]
        result = (base + slope * x.detach()[..., :1]).to(x.dtype)  # others for each token
        self.given.append(result.requires_grad_(torch.is_grad_enabled()))
        return result.clone()  # some write over it

    def calls(self, name: Any) -> list[Call]:
        """Return its calls; raise if they are several of what is no dropout."""
        if len(self.seen) > 1 and not isinstance(self.child, (nn.Dropout, type(None))):
            raise ValueError(f"it calls {name} several times")
        return [Call(name, *each) for each in zip(self.seen, self.given)]


class Dropouts(TorchFunctionMode):
    """Makes a leaf of each call of torch's dropout function, which is named after its rate."""

    def __init__(self, leaves: dict[Any, Leaf], training: bool, noise: list[Tensor]) -> None:
        super().__init__()
        self.leaves, self.training, self.noise = leaves, training, noise

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.dropout:
            return function(*args, **kwargs)
        given = dict(zip(("input", "p", "training", "inplace"), args)) | kwargs
        if given["p"] == 0 or given["training"] is not self.training:
            return function(*args, **kwargs)
        return self.leaves.setdefault(float(given["p"]), Leaf(self.noise.pop()))(given["input"])


def put_leaves(module: nn.Module, leaves: dict[Any, Leaf], training: bool) -> dict[str, nn.Module]:
    """Return the children of a module with leaves in the place of some, also in containers."""
    made: dict[str, nn.Module] = {path: leaf for path, leaf in leaves.items() if path in module._modules}
    for name in dict.fromkeys(path.partition(".")[0] for path in leaves if isinstance(path, str)):
        if name not in made:
            container: Any = module._modules[name]
            mode, held = {"training": training}, container._modules.items()
            made[name] = type(container)()
            made[name]._modules = {n: leaves.get(f"{name}.{n}") or stand_in(each, mode) for n, each in held}
    return made


def read_sizes(child: nn.Module) -> tuple[int, int] | None:
    """Return how many values a child takes and gives for a token; None if it multiplies with no matrix."""
    if is_linear(child):
        return child.in_features, child.out_features  # type: ignore[return-value]
    shapes = [parameter.shape for parameter in child._parameters.values() if parameter is not None]
    matrices = [shape for shape in shapes if len(shape) == 2]
    if len(matrices) != 1 or len(shapes) > 2 or child._buffers:
        return None
    made = filled(child, lambda tensor: tensor.detach().to("meta"))
    for size in matrices[0]:  # which of both is written first differs
        x = torch.zeros(1, 1, size, device="meta", dtype=next(p.dtype for p in child.parameters()))
        found = attempt(type(child).forward, made, x)
        if isinstance(found, Tensor) and found.shape == (1, 1, sum(matrices[0]) - size):
            return size, found.shape[-1]
    return None
