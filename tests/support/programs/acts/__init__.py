"""The acts, by family; importing this enters all of them in the registry."""

from tests.support.programs.acts import (
    activations,
    adapters,
    attention,
    devices,
    errors,
    heads,
    hooks,
    kernels,
    linear_attention,
    modes,
    modules,
    parameters,
    parametrizations,
    saving,
    sub_models,
    training,
)

__all__ = [
    "activations",
    "adapters",
    "attention",
    "devices",
    "errors",
    "heads",
    "hooks",
    "kernels",
    "linear_attention",
    "modes",
    "modules",
    "parameters",
    "parametrizations",
    "saving",
    "sub_models",
    "training",
]
