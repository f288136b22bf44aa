"""Ways to save and load of transformers and peft."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_utils import load_state_dict
from transformers.trainer_utils import load_sharded_checkpoint

from tests.support.saving import models
from tests.support.saving.ways import WAYS, Way, into

SHARD = "20KB"  # several files


def save(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)


def pretrained(fresh: PreTrainedModel, folder: Path | None, **options: Any) -> PreTrainedModel:
    """Load a model of a class, on the device of another and with kernels if that one has them."""
    kernels = models.has_kernels(fresh)
    return type(fresh).from_pretrained(folder, device_map=fresh.device.type, use_kernels=kernels, **options)


def save_in_shards(model: PreTrainedModel, folder: Path) -> None:
    """In the names of the model, which are not those of the Hub where experts are merged."""
    save(model, folder, max_shard_size=SHARD, save_original_format=False)
    assert len(list(folder.glob("*.safetensors"))) > 1


def save_with_a_state_dict(model: PreTrainedModel, folder: Path) -> None:
    save(model, folder, state_dict={n: v.cpu() for n, v in model.state_dict().items()}, save_original_format=False)


def from_a_state_dict(fresh: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Nothing is read but what a state dict holds, not even a dtype."""
    config = copy.deepcopy(fresh.config)
    config.dtype = None
    return pretrained(fresh, None, config=config, state_dict=torch.load(folder / "state.pt"))


WAYS |= {
    "pretrained_model": Way(save, pretrained),
    "pretrained_in_shards": Way(save_in_shards, load_sharded_checkpoint),
    "pretrained_with_a_state_dict": Way(
        save_with_a_state_dict, lambda fresh, folder: into(fresh, load_state_dict(folder / "model.safetensors"))
    ),
    "pretrained_from_a_state_dict": Way(
        lambda model, folder: torch.save(models.weights(model), folder / "state.pt"), from_a_state_dict
    ),
    "trainer_model": Way(
        lambda model, folder: Trainer(model, TrainingArguments(str(folder), report_to=[])).save_model(), pretrained
    ),
}


# ---- peft: the base model is the same on both sides; what differs is the adapter -------------------------------------
def onto_a_base(fresh: PeftModel) -> nn.Module:
    """Return a base model with the weights that the saved one has, and kernels if another has them."""
    device = fresh.get_base_model().device.type
    return models.make("dense", device=device, kernels=models.has_kernels(fresh))


def load_adapter(fresh: PeftModel, folder: Path) -> nn.Module:
    assert peft.load_peft_weights(str(folder), device="cpu")
    loaded = models.adapter_on(onto_a_base(fresh))
    loaded.load_adapter(folder, "default")
    return loaded


def save_both(model: PeftModel, folder: Path) -> None:
    save_file(peft.get_base_model_state_dict(model), folder / "base")
    save_file(peft.get_peft_model_state_dict(model), folder / "adapter")


def load_both(fresh: PeftModel, folder: Path) -> None:
    peft.set_base_model_state_dict(fresh, load_file(folder / "base"))
    peft.set_peft_model_state_dict(fresh, load_file(folder / "adapter"))


adapted = partial(Way, kinds=("adapted",))
WAYS |= {
    "peft_pretrained": adapted(save, lambda fresh, folder: PeftModel.from_pretrained(onto_a_base(fresh), folder)),
    "peft_pickled": adapted(partial(save, safe_serialization=False), load_adapter),
    "peft_base_state_dict": adapted(save_both, load_both),
    "peft_whole_state_dict": adapted(
        lambda model, folder: torch.save(model.state_dict(), folder / "state.pt"),
        lambda fresh, folder: into(fresh, torch.load(folder / "state.pt", map_location="cpu")),
    ),
}
