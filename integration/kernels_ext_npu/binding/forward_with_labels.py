"""Find the model that computes a loss, among the forwards that are running."""

from __future__ import annotations

from itertools import islice
from traceback import walk_stack
from types import CodeType, FrameType

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

_FRAMES = 16  # at most so many calls lie between the forward of the model with labels and that of a head


def forward_with_labels(caller: FrameType) -> FrameType | None:
    """Return the frame of the innermost running forward of a model that was given labels; None if there is none.

    It is read from the variables of the running forwards: no hook or wrapper sees all calls. peft calls
    ``self.model.forward(...)``, accelerate and FSDP exchange forwards and classes, and a model inside another may be
    given labels or not. Where one that was given none is sharded, FSDP frees its weights before the loss of the other.
    """
    for frame, _ in islice(walk_stack(caller), _FRAMES):
        if "labels" in frame.f_code.co_varnames:
            model, labels = (frame.f_locals.get(name) for name in ("self", "labels"))
            if not isinstance(model, PreTrainedModel):
                return None
            if isinstance(labels, Tensor):
                return frame
            if isinstance(model, FSDPModule):
                return None
    return None


def frame_running(code: CodeType, frame: FrameType) -> FrameType | None:
    """Return the innermost frame, from one outwards, that runs the code of a forward; None if there is none."""
    around = islice(walk_stack(frame), _FRAMES)
    return next((each for each, _ in around if each.f_code is code), None)
