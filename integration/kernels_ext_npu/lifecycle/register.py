"""Puts our kernels into transformers' mapping, and takes them out again."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kernels_ext_npu import environment
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution import kernels_internals

BACKEND = "hccl"  # the backend of torch.distributed on NPUs, which transformers up to 5.22 does not know


def register(
    source: str | Path = "bundled",
    strict: bool = False,
    kernels: Collection[str] | None = None,
    everywhere: bool = False,
    over_packages: bool = False,
) -> None:
    """Let transformers use these kernels: call it once, before models are loaded with ``use_kernels=True``.

    Mixtures of experts use theirs from then on without being asked, unless another experts implementation was named.
    So does attention on the NPU: ``sdpa`` means the kernel there, which can also be named, ``npu_flash_attention``.
    ``generate`` with a static cache and ``compile_config=CompileConfig(backend="NPUGraph")`` decodes in graphs.

    Args:
        source: "bundled" for the copies in this package, without any network; "hub" for the repositories
            kernels-ext-npu/* on the Hub; or the path of a clone of the project.
        strict: raise if a norm, gated MLP, rotary function or experts module of a model keeps its own forward, or a
            rotary embedding or router that could be served, instead of only reporting it.
        kernels: which of the kernel repositories, such as ["RMSNorm", "RoPE"], all by default. What the others would
            serve keeps its forward, so that one can look for the kernel that makes a difference.
        everywhere: swap the kernels into every transformers model that is made from now on, also without
            ``use_kernels=True``, when it is first called on the NPU, and log the report. For frameworks that load
            models themselves: by then they have moved, adapted and sharded it.
        over_packages: let kernels go before the packages that transformers calls in place of its own functions where
            they are installed: flash-linear-attention, causal-conv1d and mamba-ssm. By default these stay, and the
            report says so.

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
        '3 of 3 norms, 1 of 1 gated MLPs, 1 of 1 rotary calls, 1 of 1 rotary tables, 1 of 1 attention, 1 of 1 heads'
    """
    environment.check()  # before torch and transformers are imported: what is wrong shows there first
    kernels_internals.check()
    from transformers.distributed import utils

    from kernels_ext_npu.binding import lazy_swap, registration
    from kernels_ext_npu.binding.torch_operators import (
        grouped_mm,
        multihead_attention,
        rms_norm,
        sdpa,
        varlen_attention,
    )
    from kernels_ext_npu.decoding import generation, static_cache
    from kernels_ext_npu.distribution import sources
    from kernels_ext_npu.lifecycle import pipeline
    from kernels_ext_npu.swaps import finders

    operators = rms_norm, sdpa, multihead_attention, varlen_attention, grouped_mm
    chosen = _chosen(kernels)
    sources.check(source, chosen)
    unregister()
    on_first_call = pipeline.swap_in_at_first_call if everywhere else None
    active = registration.Registration(source, strict, chosen, on_first_call, over_packages)
    registration.current = active
    try:
        for finder in finders.FINDERS:
            finder.install(active)
        for part in (pipeline, generation, static_cache, *operators):
            part.install(active.patches)
        if "npu" not in utils.DISTRIBUTED_BACKEND_MAP:
            active.patches.item(utils.DISTRIBUTED_BACKEND_MAP, "npu", BACKEND)
        if everywhere:
            lazy_swap.install(active.patches)
    except BaseException:
        unregister()
        raise


def unregister() -> None:
    """Leave transformers as it was.

    Models that are swapped already keep the kernels of their modules until restore(model); functions, such as rotary
    ones, belong to transformers, and are the original again for all models, as is the default of what no kernel was
    swapped into. Models that were told to name ``npu_flash_attention`` name again what they did before.

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
    from kernels_ext_npu.binding import registration

    active, registration.current = registration.current, None
    if active is None:
        return
    from kernels_ext_npu.binding import lazy_swap

    for model in list(active.waiting):
        lazy_swap.forget(model)
    active.patches.undo()


def _chosen(kernels: Collection[str] | None) -> frozenset[str]:
    if kernels is None:
        return frozenset(REPOSITORIES)
    if isinstance(kernels, str):
        raise ValueError(f"register: kernels={kernels!r} is one name; give a list, such as [{kernels!r}]")
    for name in kernels:
        if name not in REPOSITORIES:
            raise ValueError(f"register: there is no kernel {name!r}: {environment.choices(name, REPOSITORIES)}")
    return frozenset(kernels)
