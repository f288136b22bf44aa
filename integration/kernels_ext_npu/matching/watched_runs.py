"""Run the forward of a module's class on a stand-in, and see that it does nothing but arithmetic."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "reciprocal", "square", "addcmul"}
_SUMS = {"mean", "sum", "linalg_vector_norm", "_fused_rms_norm"}
_ACTIVATIONS = {"silu", "sigmoid", "gelu", "tanh", "erf", "exp"}
_VIEWS = {"view", "reshape", "_unsafe_view", "alias", "detach", "unsqueeze", "squeeze", "expand", "split", "chunk"}
_PARTS = {"slice", "select", "unbind", "transpose", "t", "permute"}
_MADE = {"_to_copy", "to", "clone", "ones", "ones_like", "scalar_tensor", "lift_fresh"}
_KNOWN = _ARITHMETIC | _SUMS | _ACTIVATIONS | _VIEWS | _PARTS | _MADE
_READS = {"_local_scalar_dense": "the host waits for a number in it"}
MAGNITUDES = (1e-2, 1.0, 1e2, 1e4)  # of numbers at which limits show
_IN_FLOAT32 = 1e-5  # a sum of some hundred products, rounded to float32 inside


class NotRecognisedError(Exception):
    """A forward does something that no formula has."""


@contextmanager
def isolated() -> Iterator[None]:
    """Let nothing of what surrounds a run change it, such as a mode or a device, nor a run what surrounds it."""
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        yield


def stand_in(module: nn.Module, members: dict[str, Any]) -> nn.Module:
    """Return an instance of a module's class with other members."""
    made: Any = object.__new__(type(module))
    made.__dict__.update({name: value for name, value in vars(module).items() if name != "forward"} | members)
    return made


def run(module: nn.Module, members: dict[str, Any], x: Tensor, called: set[str] | None = None) -> Tensor:
    """Run the forward of a class with other members, and see that it does nothing but arithmetic.

    Args:
        module: whose class it is, with its settings.
        members: in place of its own.
        x: its argument.
        called: gets the names of the operators that it calls.

    Raises:
        NotRecognisedError: it calls another operator, or writes to its argument or its members.
    """
    made = stand_in(module, members)
    before, tensors = dict(vars(made)), [x, *(p for p in made._parameters.values() if p is not None)]
    versions = [tensor._version for tensor in tensors]
    with Watched(called):
        result = type(module).forward(made, x)
    is_written = vars(made) != before or [tensor._version for tensor in tensors] != versions
    if is_written or not isinstance(result, Tensor):
        raise NotRecognisedError("it writes")
    return result


class Watched(TorchDispatchMode):
    """Refuses operators that no formula has: those that read numbers on the host, draw them, or write in place."""

    def __init__(self, called: set[str] | None = None, extra: Set[str] = frozenset()) -> None:
        super().__init__()
        self.called = set() if called is None else called
        self.known = _KNOWN | extra

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = function._schema.name.partition("::")
        if kind != "prim" and (kind != "aten" or name.removesuffix("_") not in self.known):
            raise NotRecognisedError(_READS.get(name, f"it calls {name}"))
        self.called.add(name)
        return function(*args, **(kwargs or {}))


def check_sizes(call: Callable[[Tensor], Tensor], width: int) -> None:
    """Raise if a forward asks how many tokens there are: another number may be computed in another way."""
    shapes, given = ShapeEnv(), torch.zeros(5, 7, width)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    x = mode.from_tensor(given, symbolic_context=context)
    with mode:
        call(x)
    if shapes.guards:
        raise NotRecognisedError("it asks for sizes")


def is_close(found: Tensor, expected: Tensor, limit: float = _IN_FLOAT32) -> bool:
    """Tell whether two tensors are as near as float32 inside lets them be, or some roundings in a narrower dtype."""
    limit = max(limit, 4 * torch.finfo(found.dtype).eps)
    if found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    return bool((found - expected).abs().max() <= limit * (expected.abs().max() + torch.finfo(torch.float32).tiny))


def are_same(found: Tensor, expected: Tensor, arguments: list[Tensor]) -> bool:
    """Tell whether two results are the same, and their gradients with regard to some tensors, if they have any."""
    if not is_close(found, expected) or found.requires_grad != expected.requires_grad:
        return False
    if not found.requires_grad:
        return True
    grad = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad(each, arguments, grad.to(each.dtype), retain_graph=True) for each in (expected, found)
    )
    return all(is_close(b, a, 10 * _IN_FLOAT32) for a, b in zip(ours, theirs))  # a sum more is rounded on the way


def takes_one_tensor(module: nn.Module) -> bool:
    """Tell whether the forward of a module has one parameter."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
