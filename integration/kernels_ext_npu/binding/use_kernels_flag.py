"""The value of ``model._use_kernels``: true while our kernels are registered, and only then."""

from __future__ import annotations

from typing import Any

from kernels_ext_npu.binding import registration

_FIELD = "_use_kernels"  # what the property `use_kernels` of models reads, and with it train() and eval()


class WhileRegistered:
    """A value that is true while kernels are registered, put into ``model._use_kernels`` of swapped models.

    ``train()`` and ``eval()`` look at the kernels of a model for which it is true. With a plain True they would take
    transformers' own from the Hub after unregister(), into copies of the model, too.
    """

    def __init__(self, was_asked: bool) -> None:
        # whether the user has said ``use_kernels=True``; a pickle of the model says it again
        self.was_asked = was_asked

    def __bool__(self) -> bool:
        return registration.current is not None

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> WhileRegistered:
        return self

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (self.was_asked,)


def note(model: Any, was_asked: bool) -> None:
    """Let a model of transformers that kernels were swapped into look at them again in ``train()`` and ``eval()``."""
    vars(model)[_FIELD] = WhileRegistered(was_asked)


def is_for_npu_only(model: Any) -> bool:
    """Tell whether a model has kernels by ``kernelize`` alone, which means those for the NPU, wherever it is now."""
    noted = vars(model).get(_FIELD)
    return isinstance(noted, WhileRegistered) and not noted.was_asked


def is_noted(model: Any) -> bool:
    """Tell whether ``train()`` and ``eval()`` of a model look at kernels."""
    return bool(vars(model).get(_FIELD, False))


def forget(model: Any) -> None:
    """Let ``train()`` and ``eval()`` leave a model as it is."""
    vars(model)[_FIELD] = False
