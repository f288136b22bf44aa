"""What a forward or a function computes, as a text that is equal where the syntax trees are.

Compared is the forward together with the methods of the class and the functions of its file that it calls, after
docstrings, annotations and the names of local variables are normalised. Attributes, constants, the order of operations
and the objects behind global names all count; of a torch.autograd.Function its forward and backward do. A decorated or
wrapped function never matches: what the wrapper does is not in the tree. Exceptions are what `kernels` makes of a
function that transformers decorates for it, a module that calls the function; transformers' decorator of functions that
a package may compute in their place; the two decorators of its rotary embeddings, and torch.no_grad on a method that a
forward calls, which the reference then has too; and its decorator of experts, which says itself what a class computes.
Of a function and its helpers the names of the parameters count too, since callers may use them; the names of the
helpers do not.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FunctionType, ModuleType

import torch
from torch import nn
from transformers.integrations import hub_kernels
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.references.experts import Experts

_KERNEL_DECORATORS = ("use_kernel_forward_from_hub",)
_FALLBACK_DECORATORS = ("use_kernel_func_from_hub_with_fallback",)
_NO_GRAD, _ROTARY_DECORATORS = ("torch.no_grad",), ("torch.no_grad", "dynamic_rope_update")

_computes_as: dict[tuple[type, object, tuple[type, ...]], bool] = {}  # with the forward: other libraries replace it


def fingerprint(cls: type) -> str | None:
    """Return a text that is equal for classes whose forwards do the same in the same words.

    It is None if the source cannot be read.
    """
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, FunctionType):
        return None
    if is_experts_class(cls):
        return "use_experts_implementation"
    forward, decorators = _under_rotary_decorators(forward)
    trees = [str(decorators)]
    functions = [("forward", forward)]
    by_name: set[str] = set()  # what is called with keywords
    for name, function in functions:  # grows while it runs
        undecorated = None if function is forward else _under_no_grad(function)
        if undecorated is not None:
            tree = _tree(undecorated, ("torch.no_grad",))
        else:
            tree = _tree(function, decorators if function is forward else ())
        if tree is None:
            return None
        trees += ["no_grad"] * (undecorated is not None)
        known = {name for name, _ in functions}
        functions += [(n, f) for n, f in _called(tree, cls, function) if n not in known]
        by_name |= {
            ast.unparse(n.func).split(".")[-1] for n in ast.walk(tree) if isinstance(n, ast.Call) and n.keywords
        }
        _Normalised().visit(tree)
        trees.append(f"{name}: {ast.dump(tree)} {_objects(tree, function)}")
    parameters = {name: list(inspect.signature(function).parameters) for name, function in functions if name in by_name}
    trees.append(str(parameters))
    return "\n".join(trees)


def computes_as(cls: type, *references: type) -> bool:
    """Tell whether the forward of a class does what that of one of the references does.

    Example: an expert in a list may be of any class whose forward is ``LlamaMLP``'s.
    """
    key = cls, getattr(cls, "forward", None), references
    if key not in _computes_as:
        patterns = {fingerprint(reference) for reference in references}
        _computes_as[key] = words(cls) in map(words, references) and fingerprint(cls) in patterns
    return _computes_as[key]


def function_fingerprint(function: object) -> str | None:
    """Return a text that is equal for functions that do the same in the same words.

    It is None if the source cannot be read.
    """
    original = original_function(function)
    if original is None:
        return None
    trees = []
    functions = {original.__name__: original}
    for helper in (waiting := [original]):  # grows while it runs
        tree = _tree(helper, _decorators(function) if helper is original else ())
        if tree is None:
            return None
        for name, callee in _called(tree, None, helper):
            if name not in functions:
                functions[name] = callee
                waiting.append(callee)
        _Normalised().visit(tree)
        objects = _objects(tree, helper, functions)
        _Renamed(list(functions)).visit(tree)
        trees.append(f"{list(inspect.signature(helper).parameters)} {ast.dump(tree)} {objects}")
    return "\n".join(trees)


def original_function(function: object) -> FunctionType | None:
    """Return the function itself, also where `kernels` made a module of it; None for what is neither."""
    if isinstance(function, FunctionType):
        return function
    if not is_kernel_function(function):
        return None
    original = _wrapped(function)
    if original is not None and _is_fallback(original):
        original = _cells(original)["torch_function"]  # type: ignore[assignment]
    return original if isinstance(original, FunctionType) else None


def package_function(function: object) -> Callable | None:
    """Return what transformers calls of an installed package in place of a function; None where it calls its own."""
    wrapped = _wrapped(function) if is_kernel_function(function) else None
    if wrapped is None or not _is_fallback(wrapped):
        return None
    cells = _cells(wrapped)
    return cells["implementation"] if cells["is_new_implementation"] else None  # type: ignore[return-value]


def is_kernel_function(function: object) -> bool:
    """Tell whether an object is a module that `kernels` made of a function."""
    return isinstance(function, nn.Module) and type(function).__qualname__ == "_create_func_module.<locals>.Func"


def _wrapped(function: object) -> FunctionType | None:
    """Return what the module calls that `kernels` made of a function."""
    wrapped = _cells(vars(type(function))["forward"]).get("func")
    return wrapped if isinstance(wrapped, FunctionType) else None


def _is_fallback(function: FunctionType) -> bool:
    """Tell by its code whether a function is the wrapper that calls a package's function or the one of transformers."""
    decorator = getattr(hub_kernels, _FALLBACK_DECORATORS[0], None)  # not every release has it
    inner = decorator.__code__.co_consts if decorator is not None else ()
    return any(function.__code__ in code.co_consts for code in inner if isinstance(code, CodeType))


def _decorators(function: object) -> tuple[str, ...]:
    """Return the decorators that may stand above a function in its source."""
    if not is_kernel_function(function):
        return ("staticmethod",)  # those of a torch.autograd.Function are
    wrapped = _wrapped(function)
    return _FALLBACK_DECORATORS if wrapped is not None and _is_fallback(wrapped) else _KERNEL_DECORATORS


def is_experts_class(cls: type) -> bool:
    """Tell whether the forward of a class calls the experts implementation that the config names.

    It has to take it out of transformers' own table of them.
    """
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__code__ is not Experts.forward.__code__:
        return False
    return _cells(forward)["experts_interface"] is ALL_EXPERTS_FUNCTIONS


def words(cls: type) -> tuple[str, ...]:
    """Return the attributes and global names in the byte code of a forward.

    They are equal where the trees are, and known without reading the source, which takes far longer.
    """
    forward = getattr(cls, "forward", None)
    return forward.__code__.co_names if isinstance(forward, FunctionType) else ()


def function_words(function: FunctionType) -> tuple[str, ...]:
    """Return the same for a function, but for the functions of its file, whose names do not count."""
    known = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    return tuple(n for n, v in known if not isinstance(v, FunctionType) or v.__module__ != function.__module__)


def _objects(tree: ast.AST, function: FunctionType, known: Collection[str] = ()) -> list[str]:
    """Describe what stands behind the global names of a function, but for those that are compared themselves."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & function.__globals__.keys()
    return [f"{n}={_describe(function.__globals__[n], function)}" for n in sorted(names.difference(known))]


def _under_rotary_decorators(forward: FunctionType) -> tuple[FunctionType, tuple[str, ...]]:
    """Return the function in torch.no_grad's wrapper, and in dynamic_rope_update's in that, and their names.

    Anything else comes back as it is.
    """
    inside = _under_no_grad(forward)
    if inside is None:
        return forward, ()
    if inside.__code__ is not dynamic_rope_update(_undecorated).__code__:
        return inside, _NO_GRAD
    function = _cells(inside).get("rope_forward")
    return (function, _ROTARY_DECORATORS) if isinstance(function, FunctionType) else (forward, ())


def _under_no_grad(function: FunctionType) -> FunctionType | None:
    """Return the function in torch.no_grad's wrapper; None for anything else.

    The wrapper is told by its code, and by what it enters: that of enable_grad has the same code.
    """
    if function.__code__ is not torch.no_grad()(_undecorated).__code__:
        return None
    factory, inner = (_cells(function).get(name) for name in ("ctx_factory", "func"))
    if type(getattr(factory, "__self__", None)) is not torch.no_grad:
        return None
    return inner if isinstance(inner, FunctionType) else None


def _undecorated() -> None:
    """Do nothing: the decorators show their code on what they decorate, and that is this."""


def _cells(function: FunctionType) -> dict[str, object]:
    return {n: cell.cell_contents for n, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}


def _tree(function: FunctionType, allowed: tuple[str, ...] = ()) -> ast.FunctionDef | None:
    if hasattr(function, "__wrapped__"):
        return None
    try:
        source = inspect.getsource(function)
        (tree,) = ast.parse(textwrap.dedent(source)).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source file, or not one function
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    decorators = [ast.unparse(decorator).partition("(")[0] for decorator in tree.decorator_list]
    return tree if not decorators or decorators == list(allowed) else None


def _describe(value: object, user: FunctionType) -> str:
    """Describe an object so that those differ that go by the same name in two files."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):  # those of the same file are compared themselves
        return "here" if value.__module__ == user.__module__ else f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return " ".join(str(function_fingerprint(part)) for part in (value.forward, value.backward))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _called(tree: ast.FunctionDef, cls: type | None, function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """Find the methods of the class and the functions of the same file that a function calls."""
    receiver = tree.args.args[0].arg if tree.args.args else None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        callee: Callable | None = None
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            name = node.func.attr
            if cls is not None and node.func.value.id == receiver and name not in vars(nn.Module):
                callee = inspect.getattr_static(cls, name, None)
        elif isinstance(node.func, ast.Name):
            name = node.func.id
            callee = function.__globals__.get(name)
        if isinstance(callee, FunctionType) and callee.__module__ == function.__module__:
            yield name, callee


class _Normalised(ast.NodeTransformer):
    """The numbering of parameters and local variables in the order in which they appear; the rest stays."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.locals = {argument.arg for argument in arguments} | stored
        self.numbers: dict[str, str] = {}
        node.name, node.decorator_list, node.returns = "_", [], None
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg, node.annotation = self._number(node.arg), None
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.locals:
            node.id = self._number(node.id)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return self.generic_visit(node)
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def _number(self, name: str) -> str:
        return self.numbers.setdefault(name, str(len(self.numbers)))


class _Renamed(ast.NodeTransformer):
    """The renaming of helpers by the order in which they are called."""

    def __init__(self, names: list[str]) -> None:
        self.numbers = {name: f"function {number}" for number, name in enumerate(names)}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.numbers.get(node.id, node.id)
        return node
