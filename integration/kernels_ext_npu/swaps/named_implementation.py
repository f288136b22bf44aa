"""Implementations of ours that configs name: transformers has tables of them for attention and for experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import IMPLEMENTATION


@dataclass(frozen=True)
class NamedImplementation:
    """An implementation, by the name that it has in transformers' table and in configs.

    Attributes:
        name: of the implementation.
        repository: of the kernel that it calls.
        field: the attribute of configs that holds the name of theirs.
    """

    name: str
    repository: str
    field: str

    def is_registered(self) -> bool:
        """Tell whether models can be served."""
        return registration.uses(self.repository)

    def is_named_by(self, config: Any) -> bool:
        """Tell whether a config names it."""
        return getattr(config, self.field, None) == self.name

    def set_in(self, config: Any, before: str | None) -> None:
        """Let a config name it until unregister() or `take_out`, and then again what it named before."""
        assert registration.current is not None
        setattr(config, self.field, self.name)
        registration.current.patches.note(config, self.field, before, self.name)

    def take_out(self, config: Any, default: str) -> None:
        """Let a config that names it name again what it did before.

        Args:
            config: of a model, or of a part of one.
            default: what a copy of a config gets, of which nobody knows what it named.
        """
        if self.is_named_by(config) and registration.current is not None:
            registration.current.patches.give_back(config, self.field)
        if self.is_named_by(config):
            setattr(config, self.field, default)


# what the properties `_attn_implementation` and `_experts_implementation` of configs read
NPU_FLASH_ATTENTION = NamedImplementation(IMPLEMENTATION, "FlashAttention", "_attn_implementation_internal")
NPU_GROUPED_MM = NamedImplementation("npu_grouped_mm", "FusedMoE", "_experts_implementation_internal")
