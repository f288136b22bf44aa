"""Let transformers' ``generate`` decode in graphs on NPUs, where it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import CompileConfig, GenerationConfig, GenerationMode

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.decoding.graphed_forward import GRAPHS, GraphedForward
from kernels_ext_npu.transformers_internals import cache_in

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)  # those that ask for a compiled forward


def install(patches: Patches) -> None:
    """Let ``compile_config=CompileConfig(backend="NPUGraph")`` mean graphs."""
    patches.method(GenerationMixin, "_validate_generation_mode", _validate, registration.is_active)
    patches.method(GenerationMixin, "_valid_auto_compile_criteria", _decides, registration.is_active)
    patches.method(PreTrainedModel, "get_compiled_call", _call, registration.is_active)


def _validate(
    original: Callable, model: Any, mode: GenerationMode, generation_config: GenerationConfig, *args: Any
) -> None:
    """Refuse graphs for beams and drafts, which call the forward themselves, and would not look for them."""
    if _asks_for_graphs(generation_config) and mode not in _MODES:
        raise _refused(f"graphs are for {' and '.join(_MODES)}, and this is {mode.value}")
    original(model, mode, generation_config, *args)


def _decides(
    original: Callable[..., bool], model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> bool:
    """Answer whether ``generate`` decodes by `get_compiled_call`; raise if graphs are asked for, and cannot be."""
    if not _asks_for_graphs(generation_config):
        return original(model, model_kwargs, generation_config)
    why_not = _refusal(model, cache_in(model_kwargs))
    if why_not:
        raise _refused(why_not)
    return True


def _call(original: Callable, model: nn.Module, compile_config: CompileConfig | None) -> Callable:
    """Return the forward in graphs, for one call of ``generate``: the next one has another cache and other graphs."""
    return GraphedForward(model) if _means_graphs(compile_config) else original(model, compile_config)


def _asks_for_graphs(generation_config: GenerationConfig) -> bool:
    return _means_graphs(generation_config.compile_config) and not generation_config.disable_compile


def _means_graphs(compile_config: CompileConfig | None) -> bool:
    return compile_config is not None and compile_config.backend == GRAPHS


def _refused(why_not: str) -> ValueError:
    return ValueError(f"generate(compile_config=CompileConfig(backend={GRAPHS!r})): {why_not}")


def _refusal(model: Any, named: tuple[str, Cache] | None) -> str | None:
    """Say why a model with this cache cannot be decoded in graphs, None if it can."""
    cache = named and named[1]
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if {device.type for device in devices} != {"npu"}:
        return f"graphs are of the NPU, and the model is on {', '.join(sorted(map(str, devices)))}"
    if len(devices) > 1:
        return f"a graph is of one device, and the model is on {', '.join(sorted(map(str, devices)))}"
    if own is None or isinstance(own, DynamicCache) or not own.is_compileable:
        return "a cache that grows has another shape at every step: pass cache_implementation='static' too"
    if getattr(own, "offloading", False):
        return "a cache that is offloaded is copied by the host at every step: pass cache_implementation='static'"
    return None
