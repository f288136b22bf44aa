"""Puts our kernels into transformers' mapping, and takes them out again."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_ext_npu import environment

if TYPE_CHECKING:
    from kernels import Mode
    from torch import nn

    from kernels_ext_npu.swapping.classes import Marks

ABSENT = object()
BACKEND = "hccl"  # of torch.distributed on NPUs


@dataclass
class Registration:
    """What register() changed."""

    strict: bool
    kernels: frozenset[str]
    entries: dict[str, Any] = field(default_factory=dict)  # layer -> the table's entry before
    named_backend: bool = False  # whether transformers knew no backend of torch.distributed for the NPU

    @functools.cached_property
    def marks(self) -> Marks:
        """Made for the first model: what they are set by takes longer to import than all else here."""
        from kernels_ext_npu.swapping.classes import Marks

        return Marks()


current: Registration | None = None


def register(
    source: str | Path = "bundled",
    strict: bool = False,
    kernels: Collection[str] | None = None,
    everywhere: bool = False,
) -> None:
    """Let transformers use these kernels: call it once, before models are loaded with ``use_kernels=True``.

    Mixtures of experts use theirs from then on without being asked, unless another experts implementation was named.

    Args:
        source: "bundled" for the copies in this package, without any network; "hub" for the repositories
            kernels-ext-npu/* on the Hub; or the path of a clone of the project.
        strict: raise if a norm, gated MLP, rotary function or experts module of a model keeps its own forward, or a
            rotary embedding or router that could be served, instead of only reporting it.
        kernels: which of "FusedMoE", "RMSNorm", "RoPE" and "SwiGLU", all by default. What the others would serve keeps
            its forward, so that one can look for the kernel that makes a difference.
        everywhere: swap the kernels into every transformers model that is made from now on, also without
            ``use_kernels=True``, when it is first called on the NPU, and log the report. For frameworks that load
            models themselves: by then they have moved, adapted and sharded it.

    Raises:
        UnsupportedEnvironmentError: kernels cannot work on this machine; the message says what to do.
        FileNotFoundError: the source holds no kernels.
        ValueError: there is no kernel of such a name.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import kernels_ext_npu
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> kernels_ext_npu.register()
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config).to("npu")
        >>> model.set_use_kernels(True)  # which from_pretrained(..., device_map="npu", use_kernels=True) calls
        >>> kernels_ext_npu.report(model).summary()
        '3 of 3 norms, 1 of 1 gated MLPs, 1 of 1 rotary calls, 1 of 1 rotary tables'
    """
    global current
    environment.check()  # before torch and transformers are imported: what is wrong shows there first
    from kernels_ext_npu import sources
    from kernels_ext_npu.catalogue import LAYERS
    from kernels_ext_npu.swapping import experts_interface, forwards, saving
    from kernels_ext_npu.swapping import waiting as later

    chosen = _chosen(kernels)
    sources.check(source, chosen)
    unregister()
    current = Registration(strict, chosen)
    table = _table()
    for layer, repository in LAYERS.items():
        current.entries[layer] = dict(table[layer]) if layer in table else ABSENT
        table[layer] = {device: kernel for device, kernel in table.get(layer, {}).items() if device != "npu"}
        if repository in chosen:
            table[layer]["npu"] = sources.layer_source(source, repository, layer)
    _wrap_set_use_kernels()
    if "FusedMoE" in chosen:
        experts_interface.install(source)
    saving.install()
    forwards.install()
    current.named_backend = "npu" not in _backends()
    _backends().setdefault("npu", BACKEND)
    if everywhere:
        later.install()


def unregister() -> None:
    """Leave transformers as it was.

    Models that are swapped already keep the kernels of their modules until restore(model); rotary functions belong to
    transformers, and are the original again for all models, as is the default of what no kernel was swapped into.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import kernels_ext_npu
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> kernels_ext_npu.register()
        >>> kernels_ext_npu.unregister()
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> report = kernels_ext_npu.report(LlamaForCausalLM(config).to("npu"))
        >>> {row.reason for row in report}
        {'kernels are not registered: call kernels_ext_npu.register() before the model is loaded'}
    """
    global current
    if current is None:
        return
    registration, current = current, None
    from kernels_ext_npu.swapping import experts_interface, rotary, waiting

    waiting.remove()
    rotary.remove()
    experts_interface.remove()
    registration.marks.remove()
    if registration.named_backend and _backends().get("npu") == BACKEND:
        del _backends()["npu"]
    table, loaded = _table(), _loaded_mapping()
    for layer, entry in registration.entries.items():
        loaded.pop(layer, None)  # transformers fills it from its table at the next load
        if entry is ABSENT:
            table.pop(layer, None)
        else:
            table[layer] = entry
    _unwrap_set_use_kernels()


def left_out(repository: str) -> str | None:
    """Why nothing is served by a kernel that register() was not to use; None where it is used, or nothing is."""
    if current is None or repository in current.kernels:
        return None
    return f"register(kernels={sorted(current.kernels)}) leaves {repository} out"


def prepare(model: nn.Module) -> None:
    """Mark the classes of a model that is about to be kernelized, and the functions that they call."""
    from kernels_ext_npu.swapping import rotary

    assert current is not None
    current.marks.mark(model, _table())
    if "RoPE" in current.kernels:
        rotary.prepare(model, _table())


def swap(model: nn.Module, mode: Mode) -> None:
    """Let `kernels` take what is marked, for the NPU."""
    import kernels

    kernels.kernelize(model, mode=mode, device="npu", use_fallback=kernels.KernelizeFallback.ALL)


def finish(model: nn.Module, mode: Mode) -> None:
    """After a model was kernelized: what a mark on its class could not say, packing; and what strict promises."""
    from kernels import Device, KernelizeFallback
    from kernels.layer.layer import kernelize_layer

    from kernels_ext_npu.reporting.report import report
    from kernels_ext_npu.swapping import experts, packing, rotary

    assert current is not None
    for module in current.marks.choose(model):
        kernelize_layer(module, mode=mode, device_type=Device("npu"), use_fallback=KernelizeFallback.ALL)
    packing.pack(model)
    if "FusedMoE" in current.kernels:
        experts.choose(model)
    rotary.finish()
    if not current.strict:
        return
    kept = [row for row in report(model) if not row.swapped and row.is_candidate]
    if kept:
        lines = "\n".join(f"  {row.path} ({row.class_name}): {row.reason}" for row in kept[:20])
        more = f"\n  and {len(kept) - 20} more" if len(kept) > 20 else ""
        raise RuntimeError(f"register(strict=True): {len(kept)} modules and functions stay as they were\n{lines}{more}")


def _chosen(kernels: Collection[str] | None) -> frozenset[str]:
    from kernels_ext_npu.sources import REPOSITORIES

    if kernels is None:
        return frozenset(REPOSITORIES)
    if isinstance(kernels, str):
        raise ValueError(f"register: kernels={kernels!r} is one name; give a list, such as [{kernels!r}]")
    for name in kernels:
        if name not in REPOSITORIES:
            near = difflib.get_close_matches(name.lower(), [known.lower() for known in REPOSITORIES], 1)
            hint = next((f"; did you mean {known}?" for known in REPOSITORIES if [known.lower()] == near), "")
            raise ValueError(f"register: there is no kernel {name!r}, only {', '.join(REPOSITORIES)}{hint}")
    return frozenset(kernels)


def _table() -> dict[str, dict]:
    """transformers' own table: what is written there wins over every later registration."""
    from transformers.integrations import hub_kernels

    return hub_kernels.get_kernel_mapping_transformers()


def _backends() -> dict[str, str]:
    """What transformers starts torch.distributed with on each kind of device; no release up to 5.22 knows NPUs."""
    from transformers.distributed import utils

    return utils.DISTRIBUTED_BACKEND_MAP


def _loaded_mapping() -> dict[str, Any]:
    """What `kernels` was given from the table."""
    from kernels.layer.globals import _KERNEL_MAPPING

    return _KERNEL_MAPPING.get()


def _wrap_set_use_kernels() -> None:
    import kernels
    from transformers import PreTrainedModel
    from transformers.integrations import hub_kernels

    original = PreTrainedModel.set_use_kernels

    @functools.wraps(original)
    def set_use_kernels(self: Any, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        if not use_kernels or current is None:
            original(self, use_kernels, *args, **kwargs)
            return
        from kernels_ext_npu.swapping.classes import device_of, on_its_way

        mode = kernels.Mode.TRAINING if self.training else kernels.Mode.INFERENCE
        with on_its_way(self) as without_weights:
            is_offloaded = self.device.type != "npu" and device_of(self) == "npu" and not without_weights
            if self.device.type != "npu" and not is_offloaded and not without_weights:
                warnings.warn(
                    f"use_kernels=True: {type(self).__name__} is on {self.device.type}, and kernels are swapped in for "
                    "models on the NPU. Load it with device_map='npu', or move it there and call "
                    "kernels_ext_npu.kernelize(model).",
                    stacklevel=2,
                )
            prepare(self)
            has_config = self.kernel_config is not None or any((*args, *kwargs.values()))
            if is_offloaded and not has_config:  # transformers would take kernels for the CPU, where its weights wait
                hub_kernels.register_kernel_mapping_transformers()
                self._use_kernels = True
            else:
                original(self, use_kernels, *args, **kwargs)
            if is_offloaded or without_weights:  # of the latter, transformers looked for kernels for meta
                swap(self, mode)
            finish(self, mode)

    set_use_kernels.kernels_ext_npu = original  # type: ignore[attr-defined]
    PreTrainedModel.set_use_kernels = set_use_kernels  # type: ignore[method-assign]


def _unwrap_set_use_kernels() -> None:
    """Unless somebody else has wrapped it since: then ours stays below, without effect."""
    from transformers import PreTrainedModel

    original = getattr(PreTrainedModel.set_use_kernels, "kernels_ext_npu", None)
    if original is not None:
        PreTrainedModel.set_use_kernels = original  # type: ignore[method-assign]
