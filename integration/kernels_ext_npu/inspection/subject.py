"""What is inspected: a configuration by any of its names, the model it describes on fake tensors, and its inputs."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from kernels_ext_npu import model_configs
from kernels_ext_npu.environment import RefusedError, first_line
from kernels_ext_npu.inspection.counting.known_values import KnownValues

# the classes of a configuration, the whole model before its parts
_MAPPINGS = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_MAPPING,
)


class CannotInspectError(RefusedError):
    """There is nothing to inspect. The message says why, and what to give."""


@dataclass(frozen=True)
class Subject:
    """A configuration and what else is known of it."""

    name: str  # the name as it was given
    config: PreTrainedConfig  # the configuration of the whole model
    model_class: type[PreTrainedModel]  # the class that is built of it
    remarks: list[str]  # what a reader of the figures has to know


def find(name: str, trusts_code: bool = False) -> Subject:
    """Find what a name means: a folder, a config.json, an id in the cache, a model type, or one that is known.

    Args:
        trusts_code: whether the code that a model brings, beside its config.json, may run.
    """
    path = Path(name).expanduser()
    remarks: list[str] = []
    own_class = None
    if path.is_file() or (path / "config.json").is_file():
        config, own_class = _read(path, trusts_code)
    elif name in CONFIG_MAPPING_NAMES:
        config = CONFIG_MAPPING[name]()
        remarks.append(f"sizes: what {type(config).__name__} has by default")
    elif name in model_configs.PUBLISHED:
        config = model_configs.config(name)
        remarks.append(f"sizes: {model_configs.source(name)}")
    elif path.exists():
        raise CannotInspectError(f"{path} is no checkpoint: it has no config.json")
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        config, own_class = _read(_cached(name), trusts_code)
    else:
        near = difflib.get_close_matches(name, [*CONFIG_MAPPING_NAMES, *model_configs.PUBLISHED], 3)
        hint = f" Near to it: {', '.join(near)}." if near else ""
        raise CannotInspectError(
            f"{name} is neither a folder nor a file, nor a model type of transformers {transformers.__version__}.{hint}"
            " Expected is a checkpoint folder, a config.json, a model id in the local cache, a model type such as "
            f"qwen3, or one of {', '.join(model_configs.PUBLISHED)}."
        )
    if getattr(config, "quantization_config", None) is not None:
        remarks.append("the checkpoint is quantised; counted is the model without quantisation")
    return Subject(name, config, own_class or _model_class(config), remarks)


def build(subject: Subject, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the NPU, inside a FakeTensorMode, with the dtypes that from_pretrained would load it with."""
    with torch.device("npu"), no_init_weights():
        model = subject.model_class._from_config(subject.config, dtype=dtype)
    _keep_in_float32(model, dtype)
    model.tie_weights()  # no_init_weights leaves that out
    return model


def adapt(model: PreTrainedModel, rank: int, dropout: float = 0.0) -> str:
    """Give all linear layers of a model but its head adapters in float32, as peft makes them, and say so in words."""
    if importlib.util.find_spec("peft") is None:
        raise CannotInspectError("--lora: peft is not installed: pip install peft")
    from peft import LoraConfig, inject_adapter_in_model

    def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module  # it was made where it belongs, and fake tensors cannot be moved

    try:
        with torch.device("npu"), patch.object(nn.Module, "to", stay):
            inject_adapter_in_model(LoraConfig(r=rank, lora_dropout=dropout, target_modules="all-linear"), model)
    except ValueError as error:
        raise CannotInspectError(f"--lora: {error}") from error
    return f", with adapters of rank {rank}"


def make_inputs(
    model: PreTrainedModel, batch: int, tokens: int, values: KnownValues, parts: int = 1
) -> tuple[dict[str, Any], str]:
    """Make inputs for a forward inside a FakeTensorMode, and say what they are in words.

    Args:
        parts: how many ranks have a part of every row, one of which gets them.
    """
    parameters = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    text = model.config.get_text_config()
    if parts > 1:
        if "position_ids" not in parameters or tokens % (2 * parts):
            raise CannotInspectError(
                f"--cp {parts}: rows of {tokens} tokens of {type(model).__name__} are not split: it has to be a model "
                f"that takes position_ids, and --tokens a multiple of {2 * parts}"
            )
        with _disable_current_modes():
            places = torch.arange(tokens // parts).expand(batch, -1)
        made["position_ids"] = values.learn(torch.empty(places.shape, dtype=torch.long, device="npu"), places)
        made["input_ids"] = _ids(batch, tokens // parts, text, values)
        return made, f"{batch} × {tokens} tokens, of which a rank has {tokens // parts}"
    if model.main_input_name == "input_ids" or (model.main_input_name == "inputs_embeds" and "input_ids" in parameters):
        made["input_ids"] = _ids(batch, tokens, text, values)
        if model.config.is_encoder_decoder:
            made["decoder_input_ids"] = _ids(batch, tokens, text, values)
        return made, f"{batch} × {tokens} tokens"
    if model.main_input_name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        made["pixel_values"] = torch.empty(shape, dtype=model.dtype, device="npu")
        return made, f"{batch} image{'s' * (batch > 1)} of {height} × {width}"
    if model.main_input_name == "input_features" and hasattr(model.config, "max_source_positions"):
        frames = 2 * model.config.max_source_positions  # a convolution halves them
        features = torch.empty(batch, model.config.num_mel_bins, frames, dtype=model.dtype, device="npu")
        made |= {"input_features": features, "decoder_input_ids": _ids(batch, tokens, text, values)}
        return made, f"{batch} × {frames} frames and {tokens} tokens"
    raise CannotInspectError(
        f"{type(model).__name__} takes {model.main_input_name}; counted can be what takes text (input_ids), images of "
        "one size (pixel_values) or spectrograms of one length (input_features)"
    )


def clamp(model: PreTrainedModel, tokens: int, remarks: list[str]) -> int:
    """Return as many tokens as a model has places for, where it learns a vector for each place.

    Where they are fewer than asked for, that is remarked.
    """
    text = model.config.get_text_config()
    names = ("max_target_positions", "max_position_embeddings")
    places = next((value for name in names if (value := getattr(text, name, None)) is not None), tokens)
    learned = any(
        isinstance(module, nn.Embedding) and re.search("position|wpe", path.rpartition(".")[2])
        for path, module in model.named_modules()
    )
    if model.main_input_name == "pixel_values" or not learned or tokens <= places:
        return tokens
    remarks.append(f"{places} tokens in place of {tokens}: the model has no more places")
    return places


def check_decodes(model: PreTrainedModel) -> None:
    """Refuse a model that does not decode text behind a prompt of text."""
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder or not model.can_generate():
        raise CannotInspectError(
            f"--decode: {type(model).__name__} does not go on with a text; counted can be models that generate from "
            "input_ids, without an encoder"
        )


def labels(model: PreTrainedModel, inputs: dict[str, Any], parts: int = 1) -> dict[str, Any]:
    """Return what makes a forward give a loss, of a whole row or a part; nothing where the model has none for text."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    takes = "labels" in inspect.signature(model.forward).parameters
    generates = model.can_generate() or type(model).__name__.endswith("ForMaskedLM")
    if not takes or not generates or ids is None:
        return {}
    return {"labels": ids} if parts == 1 else {"labels": ids, "shift_labels": ids, "num_items_in_batch": ids.numel()}


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what a model keeps in float32, which from_pretrained sees to and building a model from a config does not."""
    globs = [re.compile(glob.replace("*", ".*")) for glob in model._get_dtype_plan(dtype)]
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and any(glob.search(f"{path}.{name}") for glob in globs):
                    wide = tensor.detach().float()
                    tensors[name] = nn.Parameter(wide) if tensors is module._parameters else wide


def _read(path: Path, trusts_code: bool) -> tuple[PreTrainedConfig, type[PreTrainedModel] | None]:
    """Read a config.json, and the class of the model if it is in code beside that, which may run."""
    file = path / "config.json" if path.is_dir() else path
    try:
        described = json.loads(file.read_text())
    except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CannotInspectError(f"{file} is no configuration: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise CannotInspectError(f"{file} is no configuration of a transformers model: it names no model_type")
    model_type, own_classes = described["model_type"], described.get("auto_map") or {}
    if own_classes and not trusts_code and model_type not in CONFIG_MAPPING_NAMES:
        raise CannotInspectError(
            f"{file} describes a {model_type}, a model that brings its own code: inspect runs that with "
            "--trust-remote-code"
        )
    is_own = bool(own_classes) and trusts_code
    if model_type not in CONFIG_MAPPING_NAMES and not is_own:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, 1)
        hint = f"; near to it is {near[0]}" if near else ""
        raise CannotInspectError(
            f"{file} describes a {model_type}, which transformers {transformers.__version__} does not have{hint}"
        )
    try:
        source = file.parent if is_own else file  # what is named is looked for beside it
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=is_own)
        return config, _own_class(own_classes, described.get("architectures") or (), source) if is_own else None
    except CannotInspectError:
        raise
    except Exception as error:  # whatever a configuration class makes of what is written there, and code of its own
        raise CannotInspectError(f"{file} is no valid configuration of a {model_type}: {first_line(error)}") from error


def _own_class(named: Mapping[str, str], architectures: Sequence[str], folder: Path) -> type[PreTrainedModel]:
    """Return the class of a model that brings its own code: that of the checkpoint, or the whole model before parts."""
    models = [auto for auto in named if auto.startswith("AutoModel")]
    if not models:
        raise CannotInspectError(f"{folder / 'config.json'} names no class of a model in its auto_map")
    chosen = min(models, key=lambda auto: (named[auto].rpartition(".")[2] not in architectures, auto == "AutoModel"))
    return get_class_from_dynamic_module(named[chosen], folder, local_files_only=True)


def _cached(name: str) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json")
    if not isinstance(file, str):
        raise CannotInspectError(
            f"{name} is no folder, and the cache in {constants.HF_HUB_CACHE} has no config.json of such a model: "
            f"`hf download {name} config.json` brings it, without weights; or give a config.json or a model type"
        )
    return Path(file)


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and type(config) is named.config_class:
            return named
    for mapping in _MAPPINGS:
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    parts = [name for name in CONFIG_MAPPING_NAMES if name.startswith(f"{config.model_type}_")]
    such = f", such as {' or '.join(parts)}" if parts else ""
    raise CannotInspectError(
        f"transformers makes no model of a {type(config).__name__} by itself: give the configuration of a part{such}"
    )


def _ids(batch: int, tokens: int, text: PreTrainedConfig, values: KnownValues) -> Tensor:
    """Make ids ``[B, S]`` of tokens that mean nothing: no padding, no images."""
    special = {v for k, v in vars(text).items() if k.endswith("token_id") and isinstance(v, int)}
    token = next(i for i in range(len(special) + 1) if i not in special)
    with _disable_current_modes():
        real = torch.full((batch, tokens), token)
    return values.learn(torch.empty(batch, tokens, dtype=torch.long, device="npu"), real)
