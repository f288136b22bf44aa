"""One of the two models of a program, and what its user holds beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel

from kernels_ext_npu.binding import registration
from kernels_ext_npu.matching.function_scan import called_functions
from tests.support.programs import variants


class Shown(NamedTuple):
    """What an act has computed: a tensor, and how many roundings of a dtype it may be away from the other side's."""

    tensor: Tensor
    dtype: torch.dtype
    roundings: int


def has_targets(side: Side) -> bool:
    """Tell whether the model has an encoder, and a decoder that is given a target."""
    return side.variant in variants.WITH_TARGETS


class Kept(NamedTuple):
    """Outputs of a call, and what they must be whenever somebody looks."""

    outputs: Any
    logits: Tensor
    hidden_states: list[Tensor]


class Side:
    """A model and what acts leave for later ones.

    Attributes:
        variant: the name of the model that the program starts with.
        home: the device that the model computes on, "npu" or "cpu".
        has_kernels: whether acts of the kernels do anything here.
        folder: where files are written.
        model: the model as it is now, perhaps inside an adapter's.
        names: the names of its weights at the start.
        places: at how many places in memory these were.
        is_away: whether the model was moved to the CPU.
        is_altered: whether attention was changed in a way that not all implementations see.
        asked: whether the user has said ``use_kernels=True``, by which transformers takes kernels for the CPU there.
        held: what the user keeps: a state dict, a flat buffer, an optimizer, handles of hooks.
        shown: what acts have computed, in order.
        kept: outputs of calls that the user keeps, for looks later on.
        cleanups: what undoes the changes to the process that acts make.
    """

    def __init__(self, variant: str, home: str, has_kernels: bool, folder: Path) -> None:
        self.variant, self.home, self.has_kernels, self.folder = variant, home, has_kernels, folder
        self.model: nn.Module = variants.make(variant).to(home)
        if self.is_experts and home == "cpu":
            self.pretrained.set_experts_implementation("eager")  # the modeling file's own, whatever ours would be
        self.names = list(self.model.state_dict())
        self.places = self.count_places()
        self.is_away = self.is_altered = self.asked = False
        self.held: dict[str, Any] = {}
        self.shown: list[Shown] = []
        self.kept: list[Kept] = []
        self.cleanups: list[Callable[[], object]] = []

    @property
    def pretrained(self) -> PreTrainedModel:
        """The model of transformers, below an adapter's."""
        model: Any = self.model
        return model.get_base_model() if self.is_adapted else model

    @property
    def is_adapted(self) -> bool:
        """Whether the model is inside one of peft."""
        return hasattr(self.model, "peft_config") and hasattr(self.model, "get_base_model")

    @property
    def is_experts(self) -> bool:
        """Whether the model has experts."""
        return "experts" in self.variant

    @property
    def is_registered(self) -> bool:
        """Whether kernels are registered in the process."""
        return registration.current is not None

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return next(self.model.parameters()).device

    @property
    def has_steps(self) -> bool:
        """Whether a call may change a weight: a spectral norm comes nearer to it with each that is in training."""
        return any(isinstance(module, parametrizations._SpectralNorm) for module in self.model.modules())

    def count_places(self) -> int:
        """Return at how many places in memory the weights are: fewer than names where some are shared."""
        return len({tensor.data_ptr() for tensor in self.model.state_dict().values()})

    def show(self, tensor: Tensor, dtype: torch.dtype = torch.float32, roundings: int = 1) -> None:
        """Keep a result of an act, to be compared with the other side's to so many roundings of a dtype."""
        self.shown.append(Shown(tensor.detach().clone(), dtype, roundings))

    def show_gradient(self, tensor: Tensor) -> None:
        """Keep a gradient, which is rounded on its way back, too."""
        self.show(tensor, roundings=2)

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is called with: text with labels, and pictures where it sees some."""
        given = variants.inputs(self.variant, self.device)
        if self.variant != "pictures":
            return given
        return given | variants.picture(self.device, self.parameters()[0][1].dtype)

    def run(self, **options: Any) -> Any:
        """Call the model."""
        return self.model(**self.inputs | options)

    def run_text(self, **options: Any) -> Any:
        """Call the model with text alone."""
        return self.model(**variants.inputs(self.variant, self.device) | options)

    @contextmanager
    def by_original_functions(self) -> Iterator[None]:
        """Let functions, which sides share, compute as transformers wrote them, unless this one has kernels."""
        if self.has_kernels:
            yield
            return
        found = {callee.function for module in self.model.modules() for callee in called_functions(type(module))}
        held = {function: vars(function)["forward"] for function in found if "forward" in vars(function)}
        for function in held:
            del function.forward
        try:
            yield
        finally:
            for function, forward in held.items():
                function.forward = forward

    def named(self, *endings: str) -> list[tuple[str, Any]]:
        """Return the modules whose class names end in one of these, with their paths, in order."""
        return [(path, m) for path, m in self.model.named_modules() if type(m).__name__.endswith(endings)]

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the names and parameters of the model that are of floating dtype."""
        return [(name, p) for name, p in self.model.named_parameters() if p.is_floating_point()]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the model and its user have, by name, the same one under each of its names."""
        found: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        found |= dict(self.model.named_buffers(remove_duplicate=False))
        for key, value in self.held.items():
            if isinstance(value, Tensor):
                found[f"held {key}"] = value
            elif isinstance(value, dict):
                found |= {f"held {key}.{name}": t for name, t in value.items() if isinstance(t, Tensor)}
        return found

    def close(self) -> None:
        """Undo what acts have changed of the process."""
        while self.cleanups:
            self.cleanups.pop()()
