"""Make tiny, randomly initialised transformers models of many architectures, and inputs for them."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Generator, Tensor
from transformers import PreTrainedConfig, PreTrainedModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Inputs = dict[str, Tensor]
Maker = Callable[[int, int, Generator], Inputs]

TABLE = tomllib.loads((Path(__file__).resolve().parents[1] / "data" / "zoo.toml").read_text("utf-8"))
SMALL: dict[str, Any] = {name: None if value == "" else value for name, value in TABLE["small"].items()}
VISION: dict[str, Any] = SMALL | TABLE["vision"]
LINEAR, MHA = TABLE["parts"]["linear"], TABLE["parts"]["mha"]
PAD, START, IMAGE, AUDIO = (SMALL[f"{kind}_token_id"] for kind in ("pad", "decoder_start", "image", "audio"))


def text(batch: int, length: int, generator: Generator) -> Inputs:
    ids = torch.randint(2, 90, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :2] = PAD
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def wave(samples: int, batch: int, length: int, generator: Generator) -> Inputs:
    """Make a sound for each row, padded on the right, because the models only count the ones in the mask."""
    values = torch.randn(batch, samples, generator=generator)
    mask = torch.ones(batch, samples, dtype=torch.long)
    values[0, samples // 2 :] = 0
    mask[0, samples // 2 :] = 0
    return {"input_values": values, "attention_mask": mask}


def sound(samples: int, batch: int, length: int, generator: Generator) -> Inputs:
    """Make a sound of one channel for each row, without padding."""
    return {"input_values": torch.randn(batch, 1, samples, generator=generator)}


def media(*shape: int, key: str = "pixel_values", flat: bool = False, **extra: Any) -> Maker:
    """Make random tensors of this shape for each row; further arguments are the same for every row."""

    def make(batch: int, length: int, generator: Generator) -> Inputs:
        values = torch.randn(batch, *shape, generator=generator)
        constants = {name: torch.tensor([value] * batch) for name, value in extra.items()}
        return {key: values.flatten(0, 1) if flat else values, **constants}

    return make


def prompt(tokens: int, make_media: Maker, marker: int = IMAGE, kind: int = 1) -> Maker:
    """Write text in which media take up so many tokens of each row, and are of this token type."""

    def make(batch: int, length: int, generator: Generator) -> Inputs:
        made = text(batch, length + tokens, generator)
        made["input_ids"][:, 3 : 3 + tokens] = marker
        kinds = (made["input_ids"] == marker) * kind
        return made | {"mm_token_type_ids": kinds, "token_type_ids": kinds} | make_media(batch, length, generator)

    return make


def decoding(make_encoder: Maker) -> Maker:
    def make(batch: int, length: int, generator: Generator) -> Inputs:
        ids = torch.randint(2, 90, (batch, length // 2 + 1), generator=generator)
        ids[:, 0] = START  # otherwise generate() puts it there
        return make_encoder(batch, length, generator) | {"decoder_input_ids": ids}

    return make


@dataclass(frozen=True)
class Architecture:
    family: str
    model_class: str
    config: Mapping[str, Any] = field(default_factory=dict)  # beyond SMALL; a mapping for each sub-configuration
    inputs: Maker = text
    since: str = "5.20.2"  # the release of transformers that it came with


# An image and its two halves. Without the padding two rows of 8 patches are left, with a token at the end of each.
TILES = prompt(16 + 2 * (8 + 1), media(3, 3, 16, 16, image_sizes=[8, 32]))
# Patches of two frames, four of which the models merge.
GRID = prompt(4, media(16, 96, flat=True, image_grid_thw=[1, 4, 4]))
# by the words of the table
WORDS: dict[str, Any] = {
    "text": text,
    "image": IMAGE,
    "audio": AUDIO,
    "tiles": TILES,
    "grid": GRID,
    "picture": media(3, 16, 16),
    "sized_picture": media(3, 16, 16, image_sizes=[16, 16]),
    "picture_list": media(1, 3, 16, 16),
    "patches": media(16, 48, spatial_shapes=[4, 4], pixel_attention_mask=[1] * 16),
    "vision_grid": media(16, 96, flat=True, grid_thw=[1, 4, 4]),
    "positioned_patches": media(16, 48, image_position_ids=[[x, y] for y in range(4) for x in range(4)]),
    "spectrum": media(8, 16, key="input_features", feature_attention_mask=[1] * 16),
}
MAKERS: dict[str, Callable[..., Maker]] = {
    "prompt": prompt,
    "decoding": decoding,
    "wave": partial(partial, wave),
    "sound": partial(partial, sound),
}

dense = partial(Architecture, "dense")
hybrid = partial(Architecture, "hybrid")


def read(family: str, described: str | dict[str, Any]) -> Architecture:
    """Read an architecture of the table: a class, or its parts and values, and how its inputs are made."""
    own = {"class": described} if isinstance(described, str) else dict(described)
    model_class, made, since = own.pop("class"), own.pop("inputs", "text"), own.pop("since", Architecture.since)
    return Architecture(family, model_class, values(own), resolve(made), since)


def values(described: dict[str, Any]) -> dict[str, Any]:
    """Put the parts that a config is like into it, and into those inside."""
    parts = (TABLE["parts"][name] for name in described.get("like", ()))
    own = {
        key: values(value) if isinstance(value, dict) else value for key, value in described.items() if key != "like"
    }
    return {key: value for part in parts for key, value in part.items()} | own


def resolve(made: Any) -> Any:
    """Call a maker with what follows its name; of a word return what it stands for."""
    if isinstance(made, list):
        return MAKERS[made[0]](*map(resolve, made[1:]))
    return WORDS[made] if isinstance(made, str) else made


_ALL = {
    name: read(family, described)
    for family, architectures in TABLE["families"].items()
    for name, described in architectures.items()
}
# Llama4ForConditionalGeneration of transformers 5.24.0 raises whatever it is given: it looks for pictures in what its
# language model returns
BROKEN = {("llama4", "5.24.0")}
# those that the installed transformers has and can run, and those that came with a later release
ARCHITECTURES: dict[str, Architecture] = {
    name: architecture
    for name, architecture in _ALL.items()
    if Version(architecture.since) <= Version(transformers.__version__)
    and (name, transformers.__version__) not in BROKEN
}
LATER = {
    name: architecture.since
    for name, architecture in _ALL.items()
    if Version(architecture.since) > Version(transformers.__version__)
}


def configure(cls: type[PreTrainedConfig], overrides: Mapping[str, Any], small: Mapping[str, Any]) -> PreTrainedConfig:
    canonical = {alias: name for name, alias in cls.attribute_map.items()}
    values = {}
    for entry in dataclasses.fields(cls):
        key = entry.name if entry.name in small else canonical.get(entry.name)
        if key in small:
            values[entry.name] = small[key]
    values |= overrides
    default = cls()
    for name, sub in cls.sub_configs.items():
        usual = getattr(default, name)
        if usual is not None or name in overrides:
            sub = sub if usual is None else type(usual)  # the declared one may be AutoConfig
            values[name] = configure(sub, overrides.get(name, {}), VISION if name == "vision_config" else small)
    return cls(**values)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights anew: the usual initial ones and zeros hide weights that are ignored."""
    generator = Generator().manual_seed(seed)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):  # the experts of each token, which only a checkpoint sets
            order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator).argsort()
            tensor.copy_(order[:, : tensor.shape[1]])
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        first = tensor.flatten()[0].item()
        if (tensor != first).any():
            if name in parameters:  # buffers such as position tables are meant to be what they are
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 8)  # the root of SMALL's hidden size
        elif first:
            tensor.copy_(first * (0.5 + torch.rand(tensor.shape, generator=generator)))
        else:
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Make a model of the table, or of a class by its name, with small sizes and what is said of its config."""
    known = ARCHITECTURES.get(name, Architecture("", name))
    cls = find(known.model_class)
    is_vision = name not in ARCHITECTURES and "vision" in cls.config_class.__name__.lower()
    configured = configure(cls.config_class, {**known.config, **config}, VISION if is_vision else SMALL)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = cls._from_config(configured, dtype=dtype)
        randomise(model, seed)
    return model.eval()


def find(name: str) -> type[PreTrainedModel]:
    """Return a class that transformers exports, or one that is in its file alone, such as one inside a larger model."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    file = next(file for file in files if f"class {name}(" in file.read_text("utf-8"))
    return getattr(import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)


def inputs(name: str, model: PreTrainedModel, batch: int = 2, length: int = 9, seed: int = 0) -> Inputs:
    """Make the arguments of forward and generate, where the model is and of its dtype.

    ``length`` counts tokens of text, without those of images or sounds.
    """
    made = ARCHITECTURES[name].inputs(batch, length, Generator().manual_seed(seed))
    accepted = inspect.signature(model.forward).parameters
    return {
        key: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for key, value in made.items()
        if key in accepted
    }


def logits(name: str, model: PreTrainedModel, **options: Any) -> Tensor:
    """Call a model with its inputs; options go into the call."""
    return model(**inputs(name, model), **options).logits


def can_generate(name: str) -> bool:
    return getattr(transformers, ARCHITECTURES[name].model_class).can_generate()


def tensors(outputs: Any) -> Iterator[Tensor]:
    """List the tensors in the outputs of a model; caches are not among them."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping | list | tuple):
        for value in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors(value)


def loss(outputs: Any) -> Tensor:
    """Add up the mean squares of all outputs."""
    return sum(x.float().square().mean() for x in tensors(outputs) if x.is_floating_point() and x.requires_grad)
