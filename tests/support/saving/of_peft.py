"""Ways to save and load of peft. The base model is the same on both sides; what differs is the adapter."""

from pathlib import Path

import peft
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.saving import models
from tests.support.saving.ways import Loading, way


def onto_a_base(fresh: PeftModel) -> nn.Module:
    """Return a base model with the weights that the saved one has, and kernels if another has them."""
    device = fresh.get_base_model().device.type
    return models.make("dense", device=device, kernels=models.has_kernels(fresh))


@way("peft.PeftModel.save_pretrained", "peft.PeftModel.from_pretrained", kinds=("adapted",))
def peft_pretrained(model: PeftModel, folder: Path) -> Loading:
    model.save_pretrained(folder)
    return lambda fresh: PeftModel.from_pretrained(onto_a_base(fresh), folder)


@way("peft.PeftModel.load_adapter", "peft.load_peft_weights", kinds=("adapted",))
def peft_pickled(model: PeftModel, folder: Path) -> Loading:
    model.save_pretrained(folder, safe_serialization=False)

    def read(fresh: PeftModel) -> nn.Module:
        assert peft.load_peft_weights(str(folder), device="cpu")
        loaded = models.adapter_on(onto_a_base(fresh))
        loaded.load_adapter(folder, "default")
        return loaded

    return read


@way("peft.get_peft_model_state_dict", "peft.set_peft_model_state_dict", kinds=("adapted",))
def peft_state_dict(model: PeftModel, folder: Path) -> Loading:
    torch.save(peft.get_peft_model_state_dict(model), folder / "adapter.pt")

    def read(fresh: PeftModel) -> nn.Module:
        loaded = models.adapter_on(onto_a_base(fresh))
        peft.set_peft_model_state_dict(loaded, torch.load(folder / "adapter.pt", map_location="cpu"))
        return loaded

    return read


@way("peft.get_base_model_state_dict", "peft.set_base_model_state_dict", kinds=("adapted",))
def peft_base_state_dict(model: PeftModel, folder: Path) -> Loading:
    save_file(peft.get_base_model_state_dict(model), folder / "base.safetensors")
    save_file(peft.get_peft_model_state_dict(model), folder / "adapter.safetensors")

    def read(fresh: PeftModel) -> nn.Module:
        peft.set_base_model_state_dict(fresh, load_file(folder / "base.safetensors"))
        peft.set_peft_model_state_dict(fresh, load_file(folder / "adapter.safetensors"))
        return fresh

    return read


@way(kinds=("adapted",))
def peft_whole_state_dict(model: PeftModel, folder: Path) -> Loading:
    torch.save(model.state_dict(), folder / "state.pt")

    def read(fresh: PeftModel) -> nn.Module:
        fresh.load_state_dict(torch.load(folder / "state.pt", map_location="cpu"))
        return fresh

    return read
