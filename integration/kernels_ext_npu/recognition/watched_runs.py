"""Run the forward of a module's class on a stand-in, and see that it does nothing but arithmetic."""

from __future__ import annotations

import builtins
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels_ext_npu.recognition.computed import NotRecognised, NotRecognisedError, OwnOperatorError
from kernels_ext_npu.recognition.module_settings import is_setting, names_written
from kernels_ext_npu.recognition.stand_ins import snapshot, stand_in

_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "reciprocal", "square", "addcmul"}
_SUMS = {"mean", "sum", "var", "var_mean", "std", "linalg_vector_norm", "bmm", "_fused_rms_norm", "native_layer_norm"}
_ACTIVATIONS = {"silu", "sigmoid", "gelu", "tanh", "erf", "exp", "log"}
CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum"})
_VIEWS = {"view", "reshape", "_unsafe_view", "alias", "detach", "unsqueeze", "squeeze", "expand", "split", "chunk"}
_PARTS = {"slice", "select", "split_with_sizes", "unbind", "transpose", "t", "permute"}
_MADE = {"_to_copy", "to", "clone", "ones", "ones_like", "scalar_tensor", "lift_fresh", "promote_types"}
_KNOWN = frozenset(_ARITHMETIC | _SUMS | _ACTIVATIONS | _VIEWS | _PARTS | _MADE)
_READS = {"_local_scalar_dense": "the host waits for a number in it"}
_DEEDS = ("print", "open", "input")
_running = threading.RLock()  # what is put in place of these goes out in turn
_UNREAD = object()  # in the place of what a forward sets and does not read
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ANYTHING = (Exception, SystemExit)  # that a forward raises which is given what it does not expect
MAGNITUDES = (1e-2, 1.0, 1e2, 1e4)  # of numbers at which limits show
_IN_FLOAT32 = 1e-5  # a sum of some hundred products, rounded to float32 inside
ROUNDINGS = 16  # in units of a dtype: each of some eight operators rounds by half a unit or less, to be doubled


def attempt(find: Callable[..., Any], *arguments: Any, seen: list[NotRecognised] | None = None) -> Any:
    """Return what is found; None if a forward raises, whatever it raises that is given what it does not expect.

    What it was seen to do that none does which is known is added to ``seen``.

    Raises:
        OwnOperatorError: a forward calls an operator of torch_npu.
    """
    try:
        return find(*arguments)
    except OwnOperatorError:
        raise
    except NotRecognisedError as error:
        if seen is not None:
            seen.append(NotRecognised(str(error), error.kind))
    except ANYTHING:
        pass
    return None


@contextmanager
def isolated() -> Iterator[None]:
    """Let nothing of what surrounds a run change it, such as a mode or a device, nor a run what surrounds it."""
    with (
        _disable_current_modes(),
        _on_the_cpu(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("force_eager"),
        autocast(False),
        warnings.catch_warnings(),
        _without_deeds(),
    ):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        yield


@contextmanager
def _without_deeds() -> Iterator[None]:
    """Refuse to print and to open files in this thread; others do so as ever, and wait where they run a forward."""
    runner = threading.get_ident()

    def refusing(deed: Callable) -> Callable:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != runner:
                return deed(*args, **kwargs)
            raise NotRecognisedError("it prints, or opens files")

        return refuse

    with _running:
        own = {name: getattr(builtins, name) for name in _DEEDS}
        vars(builtins).update({name: refusing(deed) for name, deed in own.items()})
        try:
            yield
        finally:
            vars(builtins).update(own)


def _on_the_cpu() -> AbstractContextManager[Any]:
    """Return what makes the CPU the default device: nothing where no mode could name another one.

    A mode is asked at every call of torch, which takes longer than most of these calls do.
    """
    return torch.device("cpu") if _len_torch_function_stack() else nullcontext()


@contextmanager
def autocast(is_on: bool) -> Iterator[None]:
    """Turn autocast on or off, for all devices for which a forward may do that."""
    with ExitStack() as stack:
        for device in _autocast_devices():
            stack.enter_context(torch.autocast(device, torch.bfloat16, enabled=is_on))
        yield


def casts() -> list[bool]:
    """Tell for which of these devices autocast is on."""
    return [torch.is_autocast_enabled(device) for device in _autocast_devices()]


def _autocast_devices() -> tuple[str, ...]:
    return ("cpu", "npu") if hasattr(torch, "npu") else ("cpu",)


class Watched(TorchDispatchMode):
    """Refuses operators that no formula has: those that read numbers on the host, draw them, or write in place."""

    def __init__(self, extra: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.extra = extra
        self.autocast = False  # whether autocast is on around the forward; one that turns it on is refused
        self.called: list[str] = []  # the names of operators
        self.returned: tuple[Any, ...] | None = None  # where in it the tensor is, None if that is all that is returned

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = function._schema.name.partition("::")
        if kind == "npu":
            raise OwnOperatorError(name)
        if not self.autocast and any(casts()):
            raise NotRecognisedError("it turns autocast on")
        if kind not in ("aten", "prim") or not self.allows(function, name.removesuffix("_")):
            raise NotRecognisedError(_READS.get(name, f"it calls {name}"))
        self.called.append(name.removesuffix("_"))
        kwargs = kwargs or {}
        is_fake = any(isinstance(each, FakeTensor) for each in args)
        if name == "addcmul" and is_fake:  # which torch has for known sizes alone
            return args[0] + kwargs.get("value", 1) * args[1] * args[2]
        return function(*args, **kwargs)

    def allows(self, function: Any, name: str) -> bool:
        """Tell whether an operator is none that is refused."""
        return function.namespace == "prim" or name in _KNOWN or name in self.extra

    def tensor(self, result: Any) -> Tensor:
        """Return the tensor in what a forward returned, which may be beside numbers in a tuple."""
        if type(result) is tuple:
            self.returned = tuple(... if isinstance(each, Tensor) else each for each in result)
            tensors = [each for each in result if isinstance(each, Tensor)]
            if len(tensors) != 1 or not all(each is ... or is_setting(each) for each in self.returned):
                raise NotRecognisedError("it returns several")
            (result,) = tensors
        if not isinstance(result, Tensor):
            raise NotRecognisedError("it returns no tensor")
        return result


def run(
    module: nn.Module,
    *arguments: Tensor | None,
    tensors: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module] | None = None,
    training: bool = False,
    watch: Watched | None = None,
    written: dict[str, Any] | None = None,
) -> Tensor:
    """Run the forward of a class on a stand-in, and see that it does nothing but arithmetic.

    Args:
        module: whose class it is, with its settings.
        arguments: of the forward.
        tensors: in place of its own parameters and buffers; what is not among them is None.
        children: in place of its own; the others are there as they are, in the same mode.
        training: whether it is trained.
        watch: gets what it calls.
        written: gets what it sets attributes to that it does not read; without, it may set none.

    Raises:
        NotRecognisedError: it calls another operator, or writes to its arguments or its members.
    """
    given, watch, mode = children or {}, watch or Watched(CLAMPS), {"training": training}
    others = {name: child for name, child in module._modules.items() if name not in given and child is not None}
    stand_ins = dict(module._modules) | {name: stand_in(child, mode) for name, child in others.items()} | {**given}
    own, held = (
        {name: each if tensors is None else tensors.get(name) for name, each in place.items()}
        for place in (module._parameters, module._buffers)
    )
    made = stand_in(module, {"_parameters": own, "_modules": stand_ins, "_buffers": held, **mode})
    names = () if written is None else names_written(type(module), type(module).forward)  # type: ignore[arg-type]
    vars(made).update(dict.fromkeys(names, _UNREAD))
    watched: Any = made, *(stand_ins[name] for name in others)
    before = list(map(snapshot, watched))
    seen = [each for each in (*arguments, *own.values(), *held.values()) if each is not None]
    versions = [tensor._version for tensor in seen]
    with watch:
        result = watch.tensor(type(module).forward(made, *arguments))
    if written is not None:
        written.update({name: vars(made)[name] for name in names if vars(made)[name] is not _UNREAD})
        vars(made).update(dict.fromkeys(names, _UNREAD))
    if list(map(snapshot, watched)) != before or [tensor._version for tensor in seen] != versions:
        raise NotRecognisedError("it writes to what it is given, or to itself")
    return result


def check_sizes(call: Callable[[Tensor], Tensor], *sizes: int) -> None:
    """Raise if a forward asks how many tokens there are: another number may be computed in another way."""
    shapes, given = ShapeEnv(), torch.zeros(sizes)
    dynamic = [DimDynamic.DYNAMIC for _ in sizes[:-1]]
    context: Any = StatelessSymbolicContext(dynamic_sizes=[*dynamic, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # no call comes twice with the same symbols
    x = mode.from_tensor(given, symbolic_context=context)
    with mode:
        call(x)
    if shapes.guards:
        raise NotRecognisedError("it asks for sizes")


def taken_shapes(call: Callable[..., Any]) -> list[tuple[int, ...]]:
    """Return the shapes of tokens that a forward takes, of those that are tried: some want three dimensions."""
    found: list[tuple[int, ...]] = []
    for tokens in ((2, 3), (6,), (2, 1, 3)):
        try:
            call(*tokens)
        except NotRecognisedError:
            raise
        except ANYTHING:
            continue
        found.append(tokens)
    return found


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


def takes(module: nn.Module, count: int) -> bool:
    """Tell whether the forward of a module can be called with so many tensors, whatever else it may be given."""
    first, *others = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = [each for each in others if each.kind is each.POSITIONAL_OR_KEYWORD]
    needed = [each for each in others if each.default is each.empty and each.kind not in _ANY_NUMBER]
    return first.kind is first.POSITIONAL_OR_KEYWORD and len(needed) < count <= 1 + len(named)
