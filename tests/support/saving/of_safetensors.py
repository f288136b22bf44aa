"""Ways to save and load of safetensors."""

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load, load_file, load_model, save, save_file, save_model
from torch import nn

from tests.support.saving.ways import Loading, into, way


@way("safetensors.torch.save_file", "safetensors.torch.load_file")
def safetensors_file(model: nn.Module, folder: Path) -> Loading:
    save_file(model.state_dict(), folder / "model.safetensors")
    return lambda fresh: into(fresh, load_file(folder / "model.safetensors"))


@way("safetensors.torch.save_file", "safetensors.torch.load_file")
def safetensors_of_the_host(model: nn.Module, folder: Path) -> Loading:
    """What was copied to the host before lies there as it lay on the device."""
    save_file({name: value.cpu() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    return lambda fresh: into(fresh, load_file(folder / "model.safetensors", device=str(fresh.device)), assign=True)


@way("safetensors.torch.save", "safetensors.torch.load")
def safetensors_bytes(model: nn.Module, folder: Path) -> Loading:
    (folder / "model.safetensors").write_bytes(save(model.state_dict()))
    return lambda fresh: into(fresh, load((folder / "model.safetensors").read_bytes()))


@way("safetensors.torch.save_model", "safetensors.torch.load_model")
def safetensors_model(model: nn.Module, folder: Path) -> Loading:
    save_model(model, str(folder / "model.safetensors"))

    def read(fresh: nn.Module) -> nn.Module:
        assert load_model(fresh, folder / "model.safetensors") == (set(), [])
        return fresh

    return read


@way("safetensors.torch.save_model", "safetensors.torch.load_model")
def safetensors_model_as_it_lies(model: nn.Module, folder: Path) -> Loading:
    save_model(model, str(folder / "model.safetensors"), force_contiguous=False)

    def read(fresh: nn.Module) -> nn.Module:
        load_model(fresh, folder / "model.safetensors", device=str(fresh.device))
        return fresh

    return read


@way("safetensors.safe_open")
def safetensors_in_slices(model: nn.Module, folder: Path) -> Loading:
    save_file(model.state_dict(), folder / "model.safetensors")

    def read(fresh: nn.Module) -> nn.Module:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return into(fresh, {name: file.get_slice(name)[:] for name in file.offset_keys()})

    return read
