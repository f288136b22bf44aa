"""The acts, by family; importing this enters all of them in the registry."""

from tests.support.programs.acts import (
    adapters,
    attention,
    devices,
    errors,
    hooks,
    kernels,
    modes,
    modules,
    parameters,
    parametrizations,
    saving,
    training,
)

__all__ = [
    "adapters",
    "attention",
    "devices",
    "errors",
    "hooks",
    "kernels",
    "modes",
    "modules",
    "parameters",
    "parametrizations",
    "saving",
    "training",
]
