"""What a reference says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Reference:
    """A forward that a kernel can take the place of.

    Attributes:
        module: the class whose forward is compared.
        layer: the layer of the kernel repository, and its entry in transformers' mapping.
        refuse: why the layer cannot serve an instance, or None if it can: what the syntax tree does not show.
        repository: the kernel repository.
    """

    module: type[nn.Module]
    layer: str
    refuse: Callable[[nn.Module], str | None]
    repository: str = "RMSNorm"


@dataclass(frozen=True)
class FunctionReference:
    """A function that a kernel can take the place of.

    Attributes:
        function: the function that is compared, by its body and the names of its parameters.
        layer: the layer of the kernel repository, and its entry in transformers' mapping.
        repository: the kernel repository.
    """

    function: Callable
    layer: str
    repository: str = "RoPE"
