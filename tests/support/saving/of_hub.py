"""Ways to save and load of huggingface_hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import save_file
from torch import nn

from tests.support.saving import models
from tests.support.saving.ways import Loading, into, then, way

SHARD = 20_000  # bytes: several files


class Published(nn.Module, PyTorchModelHubMixin):
    """A model as somebody publishes it who has a class of his own around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = models.make(kind, saved=False)


@way("huggingface_hub.save_torch_model", "huggingface_hub.load_torch_model")
def hub_model(model: nn.Module, folder: Path) -> Loading:
    huggingface_hub.save_torch_model(model, folder)
    return then(lambda fresh: huggingface_hub.load_torch_model(fresh, folder))


@way("huggingface_hub.save_torch_model", "huggingface_hub.load_torch_model")
def hub_model_in_shards(model: nn.Module, folder: Path) -> Loading:
    huggingface_hub.save_torch_model(model, folder, max_shard_size=SHARD)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return then(lambda fresh: huggingface_hub.load_torch_model(fresh, folder, strict=True, map_location=fresh.device))


@way("huggingface_hub.save_torch_state_dict", "huggingface_hub.load_state_dict_from_file")
def hub_state_dict(model: nn.Module, folder: Path) -> Loading:
    huggingface_hub.save_torch_state_dict(model.state_dict(), folder)
    return lambda fresh: into(fresh, huggingface_hub.load_state_dict_from_file(folder / "model.safetensors"))


@way("huggingface_hub.save_torch_state_dict", "huggingface_hub.load_state_dict_from_file")
def hub_pickled_state_dict(model: nn.Module, folder: Path) -> Loading:
    huggingface_hub.save_torch_state_dict(model.state_dict(), folder, safe_serialization=False)
    path = folder / "pytorch_model.bin"
    return lambda fresh: into(fresh, huggingface_hub.load_state_dict_from_file(path, safe=False, weights_only=True))


@way("huggingface_hub.split_torch_state_dict_into_shards")
def hub_split_by_hand(model: nn.Module, folder: Path) -> Loading:
    state = model.state_dict()
    split = huggingface_hub.split_torch_state_dict_into_shards(state, max_shard_size=SHARD)
    for name, keys in split.filename_to_tensors.items():
        save_file({key: state[key] for key in keys}, folder / name)

    def read(fresh: nn.Module) -> nn.Module:
        files = (huggingface_hub.load_state_dict_from_file(path) for path in folder.iterdir())
        return into(fresh, {name: value for file in files for name, value in file.items()})

    return read


@way("huggingface_hub.ModelHubMixin.save_pretrained", "huggingface_hub.PyTorchModelHubMixin.from_pretrained")
def hub_mixin(model: nn.Module, folder: Path) -> Loading:
    kind = "experts" if hasattr(model.config, "num_experts") else "dense"
    published = Published(kind)
    published.model = model
    published.save_pretrained(folder)

    def read(fresh: nn.Module) -> nn.Module:
        loaded = Published.from_pretrained(folder).model
        return models.kernelized(loaded.to("npu")) if models.has_kernels(fresh) else loaded

    return read
