"""Ways to save and load of transformers and peft."""

from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import load_sharded_checkpoint

from tests.integration.whole_models.saving import models
from tests.integration.whole_models.saving.ways import Way

SHARD = "20KB"  # several files


def save(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)


def pretrained(fresh: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Load a model of a class, on the device of another and with kernels if that one has them."""
    kernels = models.has_kernels(fresh)
    return type(fresh).from_pretrained(folder, device_map=fresh.device.type, use_kernels=kernels)


def save_in_shards(model: PreTrainedModel, folder: Path) -> None:
    """In the names of the model, which are not those of the Hub where experts are merged."""
    save(model, folder, max_shard_size=SHARD, save_original_format=False)
    assert len(list(folder.glob("*.safetensors"))) > 1


WAYS: dict[str, Way] = {
    "pretrained_model": Way(save, pretrained),
    "pretrained_in_shards": Way(save_in_shards, load_sharded_checkpoint),
    "trainer_model": Way(
        lambda model, folder: Trainer(model, TrainingArguments(str(folder), report_to=[])).save_model(), pretrained
    ),
}


# ---- peft: the base model is the same on both sides; what differs is the adapter -------------------------------------
def onto_a_base(fresh: PeftModel, folder: Path) -> PeftModel:
    """Load onto a base model with the weights that the saved one has, and kernels if another has them."""
    device = fresh.get_base_model().device.type
    return PeftModel.from_pretrained(models.make("dense", device=device, kernels=models.has_kernels(fresh)), folder)


WAYS["peft_pretrained"] = Way(save, onto_a_base, kinds=("adapted",))
