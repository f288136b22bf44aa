"""Ways to save and load of safetensors, accelerate and huggingface_hub."""

from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
from accelerate import Accelerator
from accelerate.utils import modeling as offloaded
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load, load_file, load_model, save, save_file, save_model
from torch import Tensor, nn

from tests.support.saving import models
from tests.support.saving.ways import WAYS, Way, into, of_state

FILE = "model.safetensors"
SHARD = 20_000  # bytes: several files


def place(model: nn.Module) -> str:
    """Return the device of a model as safetensors takes it."""
    return str(next(model.parameters()).device)


# ---- safetensors -----------------------------------------------------------------------------------------------------
def filed(state: dict[str, Tensor], folder: Path) -> None:
    save_file(state, folder / FILE)


WAYS |= {
    "safetensors_file": of_state(filed, lambda folder: load_file(folder / FILE)),
    # what was copied to the host before lies there as it lay on the device
    "safetensors_of_the_host": Way(
        lambda model, folder: filed({name: value.cpu() for name, value in model.state_dict().items()}, folder),
        lambda fresh, folder: into(fresh, load_file(folder / FILE, device=place(fresh)), assign=True),
    ),
    "safetensors_bytes": of_state(
        lambda state, folder: (folder / FILE).write_bytes(save(state)),
        lambda folder: load((folder / FILE).read_bytes()),
    ),
    "safetensors_model": Way(
        lambda model, folder: save_model(model, str(folder / FILE)),
        lambda fresh, folder: load_model(fresh, folder / FILE),
    ),
    "safetensors_model_as_it_lies": Way(
        lambda model, folder: save_model(model, str(folder / FILE), force_contiguous=False),
        lambda fresh, folder: load_model(fresh, folder / FILE, device=place(fresh)),
    ),
}


# ---- accelerate ------------------------------------------------------------------------------------------------------
def dispatched_to_disk(fresh: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The layers on the host and the disk, the rest on the device; what is loaded is what was offloaded."""
    devices = {f"model.{name}": place(fresh) for name in ("embed_tokens", "norm", "rotary_emb")}
    devices |= {"model.layers": "disk", "lm_head": "cpu"}
    options: dict[str, Any] = {"offload_folder": folder / "offload", "offload_state_dict": True}
    loaded = accelerate.load_checkpoint_and_dispatch(fresh, str(folder), devices, **options)
    return offloaded.get_state_dict_offloaded_model(loaded)


def save_state(model: nn.Module, folder: Path) -> None:
    accelerator = Accelerator()
    accelerator.prepare(model)
    accelerator.save_state(folder)


def load_state(fresh: nn.Module, folder: Path) -> None:
    other = Accelerator()
    other.prepare_model(fresh, device_placement=False)
    other.load_state(folder)


def to_disk(model: nn.Module, folder: Path) -> None:
    accelerate.utils.offload_state_dict(folder, model.state_dict())


WAYS |= {
    "accelerator_save_model": Way(
        lambda model, folder: Accelerator().save_model(model, folder, max_shard_size=SHARD),
        lambda fresh, folder: accelerate.load_checkpoint_in_model(fresh, folder, strict=True),
    ),
    "accelerate_dispatched_to_disk": Way(
        lambda model, folder: Accelerator().save_model(model, folder), dispatched_to_disk
    ),
    "accelerator_state": Way(save_state, load_state),
    "accelerate_to_disk": Way(
        to_disk, lambda fresh, folder: offloaded.get_state_dict_offloaded_model(accelerate.disk_offload(fresh, folder))
    ),
}


# ---- huggingface_hub -------------------------------------------------------------------------------------------------
def save_in_shards(model: nn.Module, folder: Path) -> None:
    huggingface_hub.save_torch_model(model, folder, max_shard_size=SHARD)
    assert len(list(folder.glob("*.safetensors"))) > 1


class Published(nn.Module, PyTorchModelHubMixin):
    """A model as somebody publishes it who has a class of his own around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = models.make(kind, saved=False)


def publish(model: nn.Module, folder: Path) -> None:
    published = Published("experts" if hasattr(model.config, "num_experts") else "dense")
    published.model = model
    published.save_pretrained(folder)


def read_published(fresh: nn.Module, folder: Path) -> nn.Module:
    loaded = Published.from_pretrained(folder).model
    return models.kernelized(loaded.to("npu")) if models.has_kernels(fresh) else loaded


WAYS |= {
    "hub_model": Way(huggingface_hub.save_torch_model, huggingface_hub.load_torch_model),
    "hub_model_in_shards": Way(
        save_in_shards,
        lambda fresh, folder: huggingface_hub.load_torch_model(fresh, folder, strict=True, map_location=fresh.device),
    ),
    "hub_mixin": Way(publish, read_published),
}
