"""Ways to save and load of transformers."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_utils import load_state_dict
from transformers.trainer_utils import load_sharded_checkpoint

from tests.support.saving import models
from tests.support.saving.ways import Loading, into, way

SHARD = "20KB"  # several files


def pretrained(fresh: PreTrainedModel, folder: Path | None, **options: Any) -> PreTrainedModel:
    """Load a model of a class, on the device of another and with kernels if that one has them."""
    kernels = models.has_kernels(fresh)
    return type(fresh).from_pretrained(folder, device_map=fresh.device.type, use_kernels=kernels, **options)


@way("transformers.PreTrainedModel.save_pretrained", "transformers.PreTrainedModel.from_pretrained")
def pretrained_model(model: PreTrainedModel, folder: Path) -> Loading:
    model.save_pretrained(folder)
    return lambda fresh: pretrained(fresh, folder)


@way("transformers.PreTrainedModel.save_pretrained", "transformers.trainer_utils.load_sharded_checkpoint")
def pretrained_in_shards(model: PreTrainedModel, folder: Path) -> Loading:
    """In the names of the model, which are not those of the Hub where experts are merged."""
    model.save_pretrained(folder, max_shard_size=SHARD, save_original_format=False)
    assert len(list(folder.glob("*.safetensors"))) > 1

    def read(fresh: PreTrainedModel) -> nn.Module:
        load_sharded_checkpoint(fresh, folder)
        return fresh

    return read


@way("transformers.PreTrainedModel.save_pretrained", "transformers.PreTrainedModel.from_pretrained")
def pretrained_variant_in_shards(model: PreTrainedModel, folder: Path) -> Loading:
    model.save_pretrained(folder, max_shard_size=SHARD, variant="other")
    return lambda fresh: pretrained(fresh, folder, variant="other")


@way("transformers.PreTrainedModel.save_pretrained", "transformers.modeling_utils.load_state_dict")
def pretrained_with_a_state_dict(model: PreTrainedModel, folder: Path) -> Loading:
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state, save_original_format=False)
    return lambda fresh: into(fresh, load_state_dict(folder / "model.safetensors"))


@way("transformers.PreTrainedModel.from_pretrained")
def pretrained_from_a_state_dict(model: PreTrainedModel, folder: Path) -> Loading:
    """Nothing is read but what the model itself holds."""
    return lambda fresh: pretrained(fresh, None, config=model.config, state_dict=models.weights(model))


@way("transformers.PreTrainedModel.save_pretrained", "transformers.PreTrainedModel.from_pretrained")
def pretrained_beside_the_main_process(model: PreTrainedModel, folder: Path) -> Loading:
    """A process that is not the main one writes nothing."""
    model.save_pretrained(folder, is_main_process=False)
    assert not list(folder.glob("*.safetensors"))
    model.save_pretrained(folder)
    return lambda fresh: pretrained(fresh, folder)


@way("transformers.Trainer.save_model")
def trainer_model(model: PreTrainedModel, folder: Path) -> Loading:
    Trainer(model, TrainingArguments(str(folder), report_to=[])).save_model()
    return lambda fresh: pretrained(fresh, folder)
