"""Tiny models of every class of transformers that calls attention by name and can be made of small sizes alone."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu.matching import classification
from tests.support import zoo
from tests.support.zoo import Inputs

ROWS, TOKENS = 2, 11
# beside those of the zoo
CLASSES = (Path(__file__).resolve().parents[1] / "data" / "attention_types.txt").read_text().split()


def build(name: str) -> PreTrainedModel:
    """Make a model of the zoo by its key, or of a class by its name, which drops nothing where it is trained."""
    return without_dropout(zoo.build(name))


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model drop nothing where it is trained."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]:
            setattr(module, attribute, 0.0)
    return model.eval()


def served(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that call attention by name."""
    return [module for module in model.modules() if classification.calls_attention_by_name(type(module))]


Rows = dict[tuple[int, int], Tensor]  # by batch and queries, ``[B, Q]``: which rows have a value that means something


def batches(name: str, model: PreTrainedModel) -> Iterator[tuple[str, Inputs, Rows]]:
    """Make the inputs of a model, each with its name and with the rows that see a key, by eager attention."""
    for batch, inputs in _named_inputs(name, model):
        yield batch, inputs, seen(model, inputs)


def seen(model: PreTrainedModel, inputs: Inputs) -> Rows:
    """Call a model, and return which rows of queries see a key in each of its masks; those of no mask all do.

    Rows of padding that see none, on the left of causal ones or beyond a window, are what each implementation likes.
    """
    rows: Rows = {}

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        masks = (value for value in (*bound.values(), *bound.get("kwargs", {}).values()) if isinstance(value, Tensor))
        for mask in masks:
            if mask.dim() == 4 and mask.shape[1] == 1 and mask.is_floating_point() and float(mask.max()) <= 0:
                sees = (mask[:, 0] > torch.finfo(mask.dtype).min).any(-1)
                rows[tuple(sees.shape)] = sees & rows.get(tuple(sees.shape), sees)

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in served(model)]
    with torch.no_grad():
        main_output(model, inputs)
    for handle in handles:
        handle.remove()
    return rows


def kept(output: Tensor, rows: Rows) -> Tensor:
    """Return the rows of an output that mean something; of pooled ones those of sequences of which all rows do."""
    if (sees := rows.get(tuple(output.shape[:2]))) is not None:
        return output[sees.to(output.device)]
    for (batch, _), sees in rows.items():
        if output.dim() and len(output) == batch:
            return output[sees.all(-1).to(output.device)]
    return output


def main_output(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Call a model without a cache, and return its logits or its last hidden states."""
    accepted = inspect.signature(model.forward).parameters
    outputs = model(**inputs, **({"use_cache": False} if "use_cache" in accepted else {}))
    found = (getattr(outputs, name, None) for name in ("logits", "last_hidden_state"))
    return next(tensor for tensor in (*found, *zoo.tensors(outputs)) if isinstance(tensor, Tensor))


def _named_inputs(name: str, model: PreTrainedModel) -> Iterator[tuple[str, Inputs]]:
    is_of_zoo = name in zoo.ARCHITECTURES
    inputs = zoo.inputs(name, model) if is_of_zoo else _inputs(model)
    accepted = inspect.signature(model.forward).parameters
    yield "of the zoo" if is_of_zoo else "plain", inputs
    if "decoder_input_ids" in inputs:
        yield from _with_targets_as_long(model, inputs, "decoder_attention_mask" in accepted)
    if is_of_zoo or "input_ids" not in inputs or "attention_mask" not in accepted:
        return
    for side, mask in _paddings(TOKENS):
        yield f"{side} padding", inputs | {"attention_mask": mask}
    if model.can_generate() and "position_ids" in accepted and "decoder_input_ids" not in inputs:
        positions = torch.cat([torch.arange(length) for length in (5, 4, 2)])[None]
        yield "packed", {"input_ids": inputs["input_ids"][:1], "position_ids": positions}


def _with_targets_as_long(model: PreTrainedModel, inputs: Inputs, is_padded: bool) -> Iterator[tuple[str, Inputs]]:
    """Make targets as long as sources, of which one row is padded, and of the other row of targets where they can be.

    So they are where a tokenizer pads both to the longest there may be.
    """
    ids = inputs.get("input_ids")
    length = _size(model.config, "max_source_positions", TOKENS) if ids is None else ids.shape[1]
    target = {"decoder_input_ids": torch.randint(2, 90, (ROWS, length), generator=Generator().manual_seed(1))}
    for side, mask in _paddings(length):
        given = inputs | target | ({} if ids is None else {"attention_mask": mask})
        yield f"{side} padding, a target as long", given
        if is_padded:
            yield f"{side} padding, a padded target as long", given | {"decoder_attention_mask": mask.roll(1, 0)}


def _paddings(length: int) -> Iterator[tuple[str, Tensor]]:
    for side, place in (("left", slice(4)), ("right", slice(-4, None))):
        mask = torch.ones(ROWS, length, dtype=torch.long)
        mask[0, place] = 0
        yield side, mask


def _inputs(model: PreTrainedModel) -> Inputs:
    accepted, generator = inspect.signature(model.forward).parameters, Generator().manual_seed(0)
    made: Inputs = {}
    if "input_ids" in accepted:
        made["input_ids"] = torch.randint(2, 90, (ROWS, TOKENS), generator=generator)
    if "input_ids" in accepted and "decoder_input_ids" in accepted:
        made["decoder_input_ids"] = torch.randint(2, 90, (ROWS, 6), generator=generator)
    main = model.main_input_name
    if main in ("input_features", "input_values") and "input_ids" not in accepted:
        shape = (_size(model.config, "num_mel_bins", 8), 16) if main == "input_features" else (400,)
        made[main] = torch.randn(ROWS, *shape, generator=generator)
    elif "pixel_values" in accepted and "input_ids" not in accepted:
        side, channels = _size(model.config, "image_size", 16), _size(model.config, "num_channels", 3)
        made["pixel_values"] = torch.randn(ROWS, channels, side, side, generator=generator)
    elif main == "pixel_values_videos":
        frames, side = _size(model.config, "frames_per_clip", 4), _size(model.config, "image_size", 16)
        made[main] = torch.randn(ROWS, frames, 3, side, side, generator=generator)
    return made


def _size(config: PreTrainedConfig, name: str, default: int) -> int:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else default
