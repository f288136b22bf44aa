"""The private names of `kernels` that are used, and what does not work without each: no other file uses any.

A name that was moved is found wherever `kernels` holds it now. Nothing asks for a version.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernels_ext_npu.environment import TESTED, RefusedError, UnsupportedEnvironmentError, installed

if TYPE_CHECKING:
    from kernels import Mode
    from torch import nn

_VERIFY = "verify and doctor can say nothing of variants"
_DIGESTS = "verify and doctor cannot check files"
REPLACE, TAKE = "kernels.layer.layer._replace_forward", "kernels.layer.layer.kernelize_layer"
TABLE = "kernels.layer.globals._KERNEL_MAPPING"
# full name -> what is lost without it
NAMES = {
    REPLACE: "kernels would take the place of what other libraries wrapped around a forward, and no model gets any",
    TAKE: "a module is taken with all that is below it, by kernelize()",
    TABLE: "kernels keeps what unregister() takes away, until it is told another kernel",
    "kernels.backends.CANN": _VERIFY,
    "kernels.backends.CPU": _VERIFY,
    "kernels.backends._backend": _VERIFY,
    "kernels.variants._resolve_variant_for_system": _VERIFY,
    "kernels.variants.parse_variant": _VERIFY,
    "kernels.variants.resolve_variants": _VERIFY,
    "kernels._rust.Digest": _DIGESTS,
    "kernels._rust.DigestAlgorithm": _DIGESTS,
    "kernels._rust.DigestValidationError": _DIGESTS,
    "kernels._rust.DigestViolation": _DIGESTS,
    "kernels._versions.resolve_version_spec_as_ref": "verify and doctor cannot read the Hub's cache",
    "kernels.hf_hub._check_trust_remote_code": "verify cannot say whether a publisher is trusted",
    "kernels.hf_hub._get_hf_api": "doctor asks the Hub as huggingface_hub does, not as kernels does",
    "kernels.hf_hub.CACHE_DIR": "verify and doctor take KERNELS_CACHE for the cache, or that of the Hub",
    "kernels.resolver._BYTECODE_IGNORE_PATTERNS": "doctor takes a cached kernel without bytecode for incomplete",
}
_NOTHING = object()
_ADVICE = f"Take a release that was tested: pip install 'kernels{TESTED['kernels']}'"


class GoneError(RefusedError):
    """The installed release of `kernels` lacks a name that is needed. The message says which, and what to do."""


def find(name: str, otherwise: Any = None) -> Any:
    """Return what `kernels` has under a full name, or under its last part in another module; else ``otherwise``."""
    last = name.rpartition(".")[2]
    return next((vars(module)[last] for module in _holders(name)), otherwise)


def need(name: str) -> Any:
    """Return what `find` does; raise GoneError if `kernels` lacks it."""
    found = find(name, _NOTHING)
    if found is _NOTHING:
        raise GoneError(f"{_gone(name)}. {_ADVICE}")
    return found


def gone() -> list[str]:
    """Say what the installed release of `kernels` lacks, and what is lost with it, a sentence a name."""
    return [_gone(name) for name in NAMES if find(name, _NOTHING) is _NOTHING]


def check() -> None:
    """Raise UnsupportedEnvironmentError where no model can get kernels without what is gone."""
    if find(REPLACE) is None:
        raise UnsupportedEnvironmentError(f"{_gone(REPLACE)}. {_ADVICE}")


def callers(name: str) -> list[ModuleType]:
    """Return the modules of `kernels` that hold a function, and call it by its name."""
    function = need(name)
    return [module for module in _holders(name) if vars(module)[name.rpartition(".")[2]] is function]


def bind_layers(layers: Mapping[nn.Module, str], mode: Mode) -> None:
    """Let `kernels` take layers for modules, for the NPU, each as if its class were marked for that layer."""
    from kernels import Device, KernelizeFallback, kernelize

    kernelize_layer = find(TAKE)
    for module, layer in layers.items():
        cls: Any = type(module)
        own = vars(cls).get("kernel_layer_name", _NOTHING)
        cls.kernel_layer_name = layer
        try:
            if kernelize_layer is None:
                kernelize(module, mode=mode, device="npu", use_fallback=KernelizeFallback.ALL)
            else:
                kernelize_layer(module, mode=mode, device_type=Device("npu"), use_fallback=KernelizeFallback.ALL)
        finally:
            if own is _NOTHING:
                del cls.kernel_layer_name
            else:
                cls.kernel_layer_name = own


def table() -> dict[str, Any] | None:
    """Return what `kernels` takes kernels from, by layer; None where it is gone."""
    found = find(TABLE)
    return None if found is None else found.get()


def _gone(name: str) -> str:
    return f"kernels {installed('kernels')} has no {name} any more: {NAMES[name]}"


def _holders(name: str) -> Iterator[ModuleType]:
    """Yield the modules of `kernels` that have the last part of a name, first the one that the name says."""
    import kernels  # its modules with it

    path, _, last = name.rpartition(".")
    with suppress(ImportError):
        importlib.import_module(path)
    named = sys.modules.get(path)
    if named is not None and last in vars(named):
        yield named
    inside = f"{kernels.__name__}."
    # only where somebody looks further: into few of thousands of modules, whose names are cheaper to look at
    for each in [kernels.__name__, *(each for each in list(sys.modules) if each.startswith(inside))]:
        module = sys.modules[each]
        if module is not named and last in vars(module):
            yield module
