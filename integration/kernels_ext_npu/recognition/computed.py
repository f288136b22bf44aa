"""What a module was found to compute: a layer, and what the layer reads, under the names that the layer has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from kernels_ext_npu.reasons import Reason

if TYPE_CHECKING:
    from kernels_ext_npu.catalogue import Kind
    from kernels_ext_npu.recognition.module_settings import Settings
    from kernels_ext_npu.recognition.moe_blocks.formulas import MoEBlock
    from kernels_ext_npu.recognition.rotations.modules import RotatingModule
    from kernels_ext_npu.recognition.routers.formulas import Router

Steps = tuple["str | float", ...]  # children that are called one after the other; a number is the rate of a dropout


class Computed(NamedTuple):
    """What a module computes, in the terms of the layer that computes the same."""

    layer: str
    parameters: tuple[tuple[str, str | None], ...] = ()  # what the layer reads -> the name of that in the module
    projections: tuple[tuple[str, str | None], ...] = ()  # the same; without a name it is what it gets
    activation: nn.Module | None = None  # of layers that ask for it
    numbers: tuple[tuple[str, Any], ...] = ()  # what the layer reads -> its value
    ahead: Steps = ()  # what is called before the layer
    between: tuple[str, Steps] | None = None  # what the layer calls, and the name that it has for it
    behind: Steps = ()
    dims: int = 1  # of the parameters: what has fewer gets more by them
    adds: bool = False  # what is given beside the first argument, in the end
    casts_back: bool = False  # to the dtype of the first argument
    wants_one_dtype: bool = False  # for arguments and parameters, float32 for frequencies: others round apart
    casts: bool = True  # what it computes: without, autocast decides the dtype of what is returned
    returned: tuple[Any, ...] | None = None  # of what is returned, where the tensor is not all of it
    refused: Reason | None = None  # why no layer takes its place
    rotation: RotatingModule | None = None  # of a module that rotates
    block: MoEBlock | None = None  # of a module that sends tokens to experts in a list
    router: Router | None = None  # of a module that chooses experts


class NotRecognised(NamedTuple):
    """What a module does that no layer computes."""

    seen: str  # what it was seen to do; the name of the operator where it calls one of torch_npu
    kind: Kind | None = None  # what it is but for that; None where it may be anything
    calls_operator: bool = False  # whether it calls one


class NotRecognisedError(Exception):
    """A forward does something that no formula has: see `NotRecognised`."""

    def __init__(self, seen: str, kind: Kind | None = None) -> None:
        super().__init__(seen)
        self.kind = kind


class OwnOperatorError(NotRecognisedError):
    """A forward calls an operator of torch_npu by itself, whose name this is."""


class Recognised(NamedTuple):
    """What a module computes, and for which settings that holds."""

    computed: Computed
    settings: Settings
