"""Ways to save and load of accelerate."""

import json
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator, checkpointing
from accelerate.utils import OffloadedWeightsLoader, offload
from accelerate.utils import modeling as offloaded
from torch import nn

from tests.support.saving.ways import Loading, into, then, way

SHARD = "20KB"  # several files


def place(model: nn.Module) -> str:
    """Return the device of a model as safetensors takes it."""
    return str(next(model.parameters()).device)


@way("accelerate.utils.save", "accelerate.utils.load")
def accelerate_save(model: nn.Module, folder: Path) -> Loading:
    accelerate.utils.save(model.state_dict(), folder / "state.pt")
    return lambda fresh: into(fresh, accelerate.utils.load(folder / "state.pt", map_location="cpu"))


@way("accelerate.utils.save", "accelerate.utils.clean_state_dict_for_safetensors", "accelerate.utils.load_state_dict")
def accelerate_save_safetensors(model: nn.Module, folder: Path) -> Loading:
    accelerate.utils.save(model.state_dict(), folder / "model.safetensors", safe_serialization=True)
    return lambda fresh: into(fresh, accelerate.utils.load_state_dict(str(folder / "model.safetensors")))


@way("accelerate.Accelerator.save", "accelerate.Accelerator.get_state_dict")
def accelerator_save(model: nn.Module, folder: Path) -> Loading:
    accelerator = Accelerator()
    accelerator.save(accelerator.get_state_dict(model), folder / "model.safetensors", safe_serialization=True)
    devices = {"": "npu"}
    return lambda fresh: into(fresh, accelerate.utils.load_state_dict(str(folder / "model.safetensors"), devices))


@way("accelerate.Accelerator.save_model", "accelerate.utils.load_checkpoint_in_model")
def accelerator_save_model(model: nn.Module, folder: Path) -> Loading:
    Accelerator().save_model(model, folder, max_shard_size=SHARD)
    return then(lambda fresh: accelerate.load_checkpoint_in_model(fresh, folder, strict=True))


@way("accelerate.Accelerator.save_model", "accelerate.load_checkpoint_in_model")
def accelerator_save_model_pickled(model: nn.Module, folder: Path) -> Loading:
    Accelerator().save_model(model, folder, safe_serialization=False)
    return then(lambda fresh: accelerate.load_checkpoint_in_model(fresh, folder, device_map={"": fresh.device}))


@way("accelerate.load_checkpoint_and_dispatch", "accelerate.dispatch_model")
def accelerate_dispatched(model: nn.Module, folder: Path) -> Loading:
    Accelerator().save_model(model, folder)

    def read(fresh: nn.Module) -> nn.Module:
        return accelerate.load_checkpoint_and_dispatch(fresh, str(folder), {"": place(fresh)})

    return read


@way("accelerate.load_checkpoint_and_dispatch", "accelerate.dispatch_model")
def accelerate_dispatched_to_disk(model: nn.Module, folder: Path) -> Loading:
    """The layers on the host and the disk, the rest on the device; what is loaded is what was offloaded."""
    Accelerator().save_model(model, folder)

    def read(fresh: nn.Module) -> dict[str, torch.Tensor]:
        parts = {"model.layers": "disk", "lm_head": "cpu"}
        devices = {f"model.{name}": place(fresh) for name in ("embed_tokens", "norm", "rotary_emb")} | parts
        kwargs = {"offload_folder": folder / "offload", "offload_state_dict": True}
        loaded = accelerate.load_checkpoint_and_dispatch(fresh, str(folder), devices, **kwargs)
        return offloaded.get_state_dict_offloaded_model(loaded)

    return read


@way("accelerate.Accelerator.save_state", "accelerate.Accelerator.load_state")
def accelerator_state(model: nn.Module, folder: Path, **options: bool) -> Loading:
    """Saved by one accelerator with its model, loaded by another."""
    accelerator = Accelerator()
    accelerator.prepare(model)
    accelerator.save_state(folder, **options)

    def read(fresh: nn.Module) -> nn.Module:
        other = Accelerator()
        other.prepare_model(fresh, device_placement=False)
        other.load_state(folder)
        return fresh

    return read


@way("accelerate.Accelerator.save_state", "accelerate.Accelerator.load_state")
def accelerator_state_pickled(model: nn.Module, folder: Path) -> Loading:
    return accelerator_state(model, folder, safe_serialization=False)


@way("accelerate.checkpointing.save_custom_state", "accelerate.checkpointing.load_custom_state")
def accelerator_custom_state(model: nn.Module, folder: Path) -> Loading:
    Accelerator()  # what they log with
    checkpointing.save_custom_state(model, folder)
    return then(lambda fresh: checkpointing.load_custom_state(fresh, folder))


@way(
    "accelerate.utils.offload_state_dict",
    "accelerate.disk_offload",
    "accelerate.utils.modeling.get_state_dict_offloaded_model",
)
def accelerate_to_disk(model: nn.Module, folder: Path) -> Loading:
    accelerate.utils.offload_state_dict(folder, model.state_dict())

    def read(fresh: nn.Module) -> dict[str, torch.Tensor]:
        return offloaded.get_state_dict_offloaded_model(accelerate.disk_offload(fresh, folder))

    return read


@way("accelerate.utils.offload_weight", "accelerate.utils.save_offload_index", "accelerate.utils.load_offloaded_weight")
def accelerate_weight_by_weight(model: nn.Module, folder: Path) -> Loading:
    index: dict = {}
    for name, value in model.state_dict().items():
        offload.offload_weight(value, name, folder, index)
    offload.save_offload_index(index, folder)
    assert json.loads((folder / "index.json").read_text()).keys() == model.state_dict().keys()
    return lambda fresh: into(fresh, dict(OffloadedWeightsLoader(save_folder=folder)))


@way("accelerate.utils.load_offloaded_weights")
def accelerate_weights_back_into_a_model(model: nn.Module, folder: Path) -> Loading:
    accelerate.utils.offload_state_dict(folder, model.state_dict())
    index = json.loads((folder / "index.json").read_text())
    return then(lambda fresh: accelerate.utils.load_offloaded_weights(fresh, index, folder))
