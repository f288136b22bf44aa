"""Decisions: what is to compute each site of a model, and why no kernel does.

A finder looks at a model as it is, and yields a decision for each of its sites: the forward of a module, a function
that it calls, a name in its config. `kernelize` puts what was decided into the model; the report runs the same finders,
and tells what they find beside what stands at the site. Nothing else says why something is not served. What stands at a
site is read from the site alone: a copy, a pickle or a model that was moved or adapted since tells what it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from kernels import Mode
from torch import nn
from transformers import PreTrainedModel

from kernels_ext_npu.binding.forward_binding import our_forward
from kernels_ext_npu.binding.loaded_kernels import OWNER, kernel_package, set_forward
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import LAYERS, ROTARY, Kind
from kernels_ext_npu.matching.class_facts import ClassFacts, class_facts
from kernels_ext_npu.matching.classification import LIBRARIES
from kernels_ext_npu.matching.fingerprint import class_methods, compared_methods
from kernels_ext_npu.matching.function_scan import CalledFunction, called_functions
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.transformers_internals import original_function

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import NotRecognised, Recognised
    from kernels_ext_npu.recognition.rotations.functions import Rotation


RECOGNISED = "recognised"  # owner of the forwards of modules that were found by running them


@dataclass(frozen=True)
class Row:
    """One module, or one function that a module calls.

    Attributes:
        path: its name in the model; of a function that of the module, a dot, and the name in its file.
        class_name: its class, or the function.
        kernel: the layer that serves it or would serve it, None if there is none; of attention the name of the
            implementation.
        swapped: whether the kernel's forward is in place.
        reason: why not, or why not as fast as it could be; None if there is nothing to say.
        is_candidate: whether one would expect a kernel for it; not so for a LayerNorm, nor for frequencies that change,
            nor for what register(kernels=...) leaves out.
        kind: what it is, as the table counts it.
        function: the name of the function in its file, None for a module.
    """

    path: str
    class_name: str
    kernel: str | None
    swapped: bool
    reason: str | None
    is_candidate: bool = True
    kind: str = "norms"
    function: str | None = None

    @property
    def module(self) -> str:
        """The name in the model of the module, or of the module that calls the function."""
        return self.path if self.function is None else self.path[: -len(self.function)].rstrip(".")


class View:
    """A model as finders look at it: its modules by path and by class, walked once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # each module once, by its first path; those that torch.jit made have no forward to look at
        self.named = [each for each in model.named_modules() if not isinstance(each[1], torch.jit.ScriptModule)]
        self.by_class: dict[type[nn.Module], list[nn.Module]] = {}
        for _, module in self.named:
            self.by_class.setdefault(type(module), []).append(module)
        self.facts: dict[type[nn.Module], ClassFacts] = {}
        for cls in self.by_class:
            mark, names = getattr(cls, "kernel_layer_name", None), compared_methods(cls, cls.forward)  # type: ignore[arg-type]
            methods = class_methods(cls, names) if names else ()
            self.facts[cls] = class_facts(cls, cls.forward, mark, methods)  # type: ignore[arg-type]

    def instances(self, classes: Collection[type[nn.Module]]) -> list[tuple[str, nn.Module]]:
        """Return the modules of some classes, with their paths, in the order of the model."""
        return [(path, module) for path, module in self.named if type(module) in classes] if classes else []

    @functools.cached_property
    def pretrained(self) -> list[PreTrainedModel]:
        """The models of transformers in it, outer ones before those in them."""
        return [module for _, module in self.named if isinstance(module, PreTrainedModel)]

    def owned(self, owner: str) -> list[nn.Module]:
        """Return the modules whose forward is that of a layer or a mechanism of ours, as it is now."""
        forwards = [(module, getattr(vars(module).get("forward"), "__func__", None)) for _, module in self.named]
        return [module for module, forward in forwards if getattr(forward, OWNER, None) == owner]

    @functools.cached_property
    def forwards(self) -> dict[nn.Module, FunctionType]:
        """The modules that forwards of ours compute, also below wrappers, before anything is put."""
        bound = [module for _, module in self.named if "forward" in vars(module)]
        return {module: ours for module in bound if (ours := our_forward(module)) is not None}

    @functools.cached_property
    def calls(self) -> list[tuple[str, nn.Module, tuple[CalledFunction, ...]]]:
        """The modules that call functions which a kernel may serve, with their paths and these functions.

        In other people's code also those that objects call which a module holds, such as diffusers' processors.
        """
        found: list[tuple[str, nn.Module, tuple[CalledFunction, ...]]] = []
        for path, module in self.named:
            facts = self.facts[type(module)]
            called = (*facts.functions, *_called_by_members(module)) if facts.is_others else facts.functions
            if called:
                found.append((path, module, tuple(dict.fromkeys(called))))
        return found

    @functools.cached_property
    def callers(self) -> dict[CalledFunction, list[nn.Module]]:
        """The functions that modules call and that a kernel may serve, each with these modules."""
        found: dict[CalledFunction, list[nn.Module]] = {}
        for _, module, functions in self.calls:
            for callee in functions:
                found.setdefault(callee, []).append(module)
        return found

    @functools.cached_property
    def recognised(self) -> dict[nn.Module, Recognised]:
        """The modules of classes that no pattern knows, and what they were found to compute by running them."""
        return {module: what for module, what in self._run if hasattr(what, "computed")}

    @functools.cached_property
    def not_recognised(self) -> dict[nn.Module, NotRecognised]:
        """The modules of such classes that do what no layer computes, and look like what one does."""
        return {module: what for module, what in self._run if hasattr(what, "seen")}

    @functools.cached_property
    def _run(self) -> list[tuple[nn.Module, Any]]:
        classes = [cls for cls, facts in self.facts.items() if facts.is_run]
        if not classes:
            return []
        from kernels_ext_npu.recognition.modules import recognise  # models of transformers do without

        return [(module, recognise(module)) for _, module in self.instances(classes)]

    @functools.cached_property
    def rotations(self) -> dict[CalledFunction, Rotation]:
        """The rotary functions of other people's code that no pattern knows, and how they rotate, if they do."""
        found: dict[CalledFunction, Rotation] = {}
        for callee in self.callers:
            function = original_function(callee.function) if callee.kind is ROTARY else None
            if function is None or function.__module__.startswith(LIBRARIES) or find_pattern(function) is not None:
                continue
            from kernels_ext_npu.recognition.rotations.functions import find_rotation  # others' models alone

            if (rotation := find_rotation(function)) is not None:
                found[callee] = rotation
        return found

    @functools.cached_property
    def function_layers(self) -> dict[CalledFunction, str]:
        """The layers of functions that a pattern knows, or that were found to rotate."""
        found = {c: pattern.layers[0] for c in self.callers if (pattern := find_pattern(c.function)) is not None}
        return found | {callee: rotation.layer for callee, rotation in self.rotations.items() if rotation.layer}

    @functools.cached_property
    def placed(self) -> dict[nn.Module, tuple[str, Any]]:
        """The modules that layers of ours compute, each with its layer and package, once the layers are in place."""
        ours = {module: our_forward(module) for _, module in self.named if "forward" in vars(module)}
        layers = {module: layer for module, each in ours.items() if (layer := getattr(each, OWNER, None)) in LAYERS}
        return {module: (layer, kernel_package(ours[module])) for module, layer in layers.items()}


def _called_by_members(module: nn.Module) -> list[CalledFunction]:
    """Return the functions that callable objects call which a module holds and which are no modules themselves."""
    held = dict.fromkeys(type(value) for value in vars(module).values() if callable(value))
    classes = [cls for cls in held if not issubclass(cls, (nn.Module, type)) and isinstance(cls.__call__, FunctionType)]
    return [callee for cls in classes for callee in called_functions(cls)]


@dataclass(frozen=True, eq=False)
class Decision:
    """What is decided of one site of a model.

    Attributes:
        path: the module's name in the model.
        module: the module whose forward it is, or that calls the function or looks up the name.
        layer: the layer or implementation that is to serve it, or would; None if there is none.
        reason: why it is not to serve it, or no longer is; None if it is.
        present: the layer or implementation of ours that is there now; None if none is.
        doubt: why what is there may not be used all the same.
        kind: what the report counts it among; None if it is no row there.
        is_candidate: as a row has it.
        function: the name in its file of the function that it is about, None for a module.
        class_name: of the module or function.
        make: makes the forward that is to be bound, or puts the method into its class, where a mechanism of ours does.
    """

    path: str
    module: nn.Module
    layer: str | None = None
    reason: str | None = None
    present: str | None = None
    doubt: str | None = None
    kind: Kind | None = None
    is_candidate: bool = True
    function: str | None = None
    class_name: str | None = None
    make: Callable[[], Any] | None = None

    @property
    def is_served(self) -> bool:
        """Whether the kernel is in place, and nothing speaks against it."""
        return self.reason is None and self.present is not None

    def row(self, remark: str | None, is_model_elsewhere: bool) -> Row:
        """Return what the report says of it, with a remark on what serves it, of a model on the NPU or elsewhere."""
        if self.present is None:
            is_swapped, reason = False, self.reason or refusals.not_swapped()
        elif self.reason is not None:
            is_swapped, reason = False, refusals.changed(self.module, self.reason, is_model_elsewhere)
        else:
            is_swapped, reason = self.doubt is None, self.doubt or remark  # type: ignore[assignment]
        return Row(
            path=self.path if self.function is None else f"{self.path}.{self.function}".lstrip("."),
            class_name=self.class_name or type(self.module).__name__,
            kernel=self.present or self.layer,
            swapped=is_swapped,
            reason=reason,
            is_candidate=self.is_candidate,
            kind=self.kind.in_models if self.kind else "",
            function=self.function,
        )


@dataclass(frozen=True)
class Swapping:
    """The context of one swap of kernels into a model."""

    registration: Registration  # what register() was told
    mode: Mode  # whether the model is trained or infers, as `kernels` knows it
    bind_layers: Callable[[Mode], None]  # lets `kernels` bind layers to marked classes, by transformers' mapping


def bind_forwards(owner: str, view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Bind the forwards that were decided upon, as those of a mechanism; take them out where it refuses them now."""
    for decision in decisions:
        if decision.make is not None:
            set_forward(decision.module, decision.make() if decision.reason is None else None, owner)


@dataclass(frozen=True)
class Finder:
    """One kind of kernel: what it decides of a model, how that gets in and out, and what it has to say of it."""

    name: str
    # yields decisions, and changes nothing
    find: Callable[[View], Iterable[Decision]] = lambda view: ()
    # puts what was decided into a model; what is as it should be is left alone
    put: Callable[[View, Iterable[Decision], Swapping], None] = lambda view, decisions, swapping: None
    # changes transformers when kernels are registered, through `registration.patches`
    install: Callable[[Registration], None] = lambda registration: None
    # undoes what `put` did to a model or a part of one, but for forwards, which all go out at the end
    revert: Callable[[View], None] = lambda view: None
    # says of decisions of any finder, whose kernels are there, what is not as fast as it could be; None if nothing
    remarks: Callable[[View, list[Decision]], Mapping[Decision, str | None]] = lambda view, served: {}
