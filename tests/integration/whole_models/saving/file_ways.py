"""Ways to save and load of safetensors, accelerate and huggingface_hub."""

from pathlib import Path

import accelerate
import huggingface_hub
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from tests.integration.whole_models.saving.ways import Way, from_state_dict, into

FILE = "model.safetensors"
SHARD = 20_000  # bytes: several files


def place(model: nn.Module) -> str:
    """Return the device of a model as safetensors takes it."""
    return str(next(model.parameters()).device)


# ---- safetensors -----------------------------------------------------------------------------------------------------
def filed(state: dict[str, Tensor], folder: Path) -> None:
    save_file(state, folder / FILE)


WAYS: dict[str, Way] = {
    "safetensors_file": from_state_dict(filed, lambda folder: load_file(folder / FILE)),
    # what was copied to the host before lies there as it lay on the device
    "safetensors_of_the_host": Way(
        lambda model, folder: filed({name: value.cpu() for name, value in model.state_dict().items()}, folder),
        lambda fresh, folder: into(fresh, load_file(folder / FILE, device=place(fresh)), assign=True),
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
def save_state(model: nn.Module, folder: Path) -> None:
    accelerator = Accelerator()
    accelerator.prepare(model)
    accelerator.save_state(folder)


def load_state(fresh: nn.Module, folder: Path) -> None:
    other = Accelerator()
    other.prepare_model(fresh, device_placement=False)
    other.load_state(folder)


WAYS |= {
    "accelerator_save_model": Way(
        lambda model, folder: Accelerator().save_model(model, folder, max_shard_size=SHARD),
        lambda fresh, folder: accelerate.load_checkpoint_in_model(fresh, folder, strict=True),
    ),
    "accelerator_state": Way(save_state, load_state),
}


# ---- huggingface_hub -------------------------------------------------------------------------------------------------
def save_in_shards(model: nn.Module, folder: Path) -> None:
    huggingface_hub.save_torch_model(model, folder, max_shard_size=SHARD)
    assert len(list(folder.glob("*.safetensors"))) > 1


WAYS |= {
    "hub_model": Way(huggingface_hub.save_torch_model, huggingface_hub.load_torch_model),
    "hub_model_in_shards": Way(
        save_in_shards,
        lambda fresh, folder: huggingface_hub.load_torch_model(fresh, folder, strict=True, map_location=fresh.device),
    ),
}
