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
        attribute: of configs, the name of theirs, as transformers reads it.
        other_name: a second one, for who takes names of a certain form only.
    """

    name: str
    repository: str
    attribute: str
    other_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it has in transformers' table and in configs."""
        return (self.name,) if self.other_name is None else (self.name, self.other_name)

    @property
    def field(self) -> str:
        """Where a config keeps it for itself: the attribute's setter reaches the configs inside, too."""
        return f"{self.attribute}_internal"

    def named_in(self, config: Any) -> str | None:
        """Return what a config names."""
        return getattr(config, self.attribute, None)

    def is_registered(self) -> bool:
        """Tell whether models can be served."""
        return registration.uses(self.repository)

    def is_named_by(self, config: Any) -> bool:
        """Tell whether a config names it."""
        return self.named_in(config) in self.names

    def set_in(self, config: Any, before: str | None, name: str | None = None) -> None:
        """Let a config name it until unregister() or `take_out`, and then again what it named before.

        Args:
            config: of a model, or of a part of one.
            before: what it named.
            name: by which it names it.
        """
        assert registration.current is not None
        setattr(config, self.field, name or self.name)
        registration.current.patches.note(config, self.field, before, name or self.name)

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


# accelerate takes names of its own for sp_attn_implementation, and such that have a slash and "flash-attn" in them:
# accelerate 1.15.0, utils/dataclasses.py, DeepSpeedSequenceParallelConfig
NPU_FLASH_ATTENTION = NamedImplementation(
    IMPLEMENTATION, "FlashAttention", "_attn_implementation", "kernels-ext-npu/flash-attn"
)
NPU_GROUPED_MM = NamedImplementation("npu_grouped_mm", "FusedMoE", "_experts_implementation")
