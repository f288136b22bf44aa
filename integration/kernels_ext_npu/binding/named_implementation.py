"""Our implementations that configs name: transformers looks attention and experts up in tables by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import IMPLEMENTATION


@dataclass(frozen=True)
class NamedImplementation:
    """Describes an implementation that transformers calls by name."""

    names: tuple[str, ...]  # what it is called in transformers' table and in configs, the usual name first
    repository: str  # the kernel that it calls
    attribute: str  # the attribute of configs that transformers reads

    @property
    def name(self) -> str:
        """Return its usual name."""
        return self.names[0]

    @property
    def field(self) -> str:
        """The private field behind the attribute, whose public setter would also overwrite the sub-configs."""
        return f"{self.attribute}_internal"

    def is_registered(self) -> bool:
        """Tell whether models can be served."""
        return registration.uses(self.repository)

    def is_named_by(self, config: Any) -> bool:
        """Tell whether a config names it."""
        return getattr(config, self.attribute, None) in self.names

    def set_in(self, config: Any, before: str | None, name: str) -> None:
        """Write one of its names into a config, until unregister() or `take_out` puts back what was there before."""
        assert registration.current is not None
        setattr(config, self.field, name)
        registration.current.patches.note(config, self.field, before, name)

    def take_out(self, config: Any, default: str) -> None:
        """Put back what a config named before; the default into a copy of a config, of which that is not known."""
        if self.is_named_by(config) and registration.current is not None:
            registration.current.patches.give_back(config, self.field)
        if self.is_named_by(config):
            setattr(config, self.field, default)


# accelerate takes names of its own for sp_attn_implementation, and such that have a slash and "flash-attn" in them:
# accelerate 1.15.0, utils/dataclasses.py, DeepSpeedSequenceParallelConfig
_NAMES = IMPLEMENTATION, "kernels-ext-npu/flash-attn"
NPU_FLASH_ATTENTION = NamedImplementation(_NAMES, "FlashAttention", "_attn_implementation")
NPU_GROUPED_MM = NamedImplementation(("npu_grouped_mm",), "FusedMoE", "_experts_implementation")
