"""Ten steps of training: of sequences that torch splits between devices, and of whole ones. Runs in the processes, too.

Each step is of the rows of `models.tokens`: as they are, with other padding around each, or packed into one sequence.
Loss and gradients are the same either way.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from transformers import DistributedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

import kernels_ext_npu
from tests.distributed import engines, models
from tests.distributed.models import IMAGE, IMAGE_START, LENGTH, ROWS, Tensors

STEPS = 10
# With it the gradients of one process in float32 stay within 4e-6 of float64; with 1e-2 those of gpt-oss are at 1.2e-5.
RATE = 3e-3
IMAGES = torch.tensor([[1, 4, 4]] * 2)  # of the first two rows
LABELS = ROWS * (LENGTH - 1)


def whole(folder: Path, is_adapted: bool) -> list[Tensors]:
    """Train one process on the CPU without kernels, with transformers' plainest formulas.

    Returns:
        Loss and gradients of each step, and behind the last one the weights.
    """
    model = _adapted(models.load(folder, experts_implementation="eager", attn_implementation="eager"), is_adapted)

    def loss_of(step: int) -> Tensor:
        ids = _tokens(model, step)
        images = {}
        if _sees(model):
            kinds = (ids == IMAGE).int()
            images = {"pixel_values": _pixels(step), "image_grid_thw": IMAGES, "mm_token_type_ids": kinds}
        loss = model(ids, labels=ids, use_cache=False, **images).loss
        loss.backward()
        return loss.detach()

    return _train(model, loss_of)


def split(folder: Path, is_adapted: bool, layout: str, attention: str | None, experts: int = 1) -> list[Tensors]:
    """Train with kernels on all processes, which have to call this together, and return what `whole` does.

    Args:
        folder: of the checkpoint.
        is_adapted: whether adapters alone are trained.
        layout: ``rows``, ``padded`` or ``packed``.
        attention: the implementation that the model names.
        experts: how many devices share experts. Then two share rows, and FSDP2 shards the other weights over all.
    """
    kernels_ext_npu.register(everywhere=True)
    try:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if experts > 1:
            placed: dict[str, Any] = {"distributed_config": DistributedConfig(ep_size=experts, fsdp_size=ranks)}
            mesh, rows = dist.init_device_mesh("npu", (ranks // 2, 2), mesh_dim_names=("dp", "cp")), rank // 2
            mesh = mesh["cp"]
        else:
            placed, rows = {"device_map": torch.device("npu", rank)}, 0
            mesh = dist.init_device_mesh("npu", (ranks,))
        model = _adapted(models.load(folder, attn_implementation=attention, **placed), is_adapted)

        def loss_of(step: int) -> Tensor:
            ids = _tokens(model, step).npu()
            buffers = _laid_out(ids.chunk(ranks // mesh.size())[rows], layout)
            features = None
            if _sees(model):
                kinds = (ids == IMAGE).int()
                buffers["position_ids"] = model.model.get_rope_index(ids, kinds, IMAGES.npu())[0]
                buffers["images"] = kinds.flatten().cumsum(0).view_as(ids) - 1
                features = torch.cat(model.model.get_image_features(_pixels(step).npu(), IMAGES.npu()).pooler_output)
            given = list(buffers.values())
            with context_parallel(mesh, buffers=given, buffer_seq_dims=[tensor.dim() - 1 for tensor in given]):
                numbers = buffers.pop("images", None)
                if features is not None:
                    own = features[numbers[buffers["input_ids"] == IMAGE]]
                    buffers["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=(own,))}
                loss = model(**buffers, labels=buffers["input_ids"], num_items_in_batch=LABELS, use_cache=False).loss
                (loss * (ranks if experts > 1 else 1)).backward()  # of which FSDP2 takes the mean
            loss = loss.detach()
            dist.all_reduce(loss)
            if experts == 1:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
            return loss.cpu()

        return _train(model, loss_of)
    finally:
        kernels_ext_npu.unregister()


def _train(model: nn.Module, loss_of: Callable[[int], Tensor]) -> list[Tensors]:
    optimizer = models.optimizer_of(model, RATE)
    steps = []
    for step in range(STEPS):
        loss = loss_of(step)
        steps.append({"loss": loss} | engines.gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, engines.weights(model)]


def _adapted(model: Any, is_adapted: bool) -> Any:
    if not is_adapted:
        return model
    from peft import LoraConfig, get_peft_model  # seconds, for one test

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # zeros hide half
        return get_peft_model(model, config)


def _sees(model: nn.Module) -> bool:
    return hasattr(model.config, "vision_config")  # type: ignore[union-attr]


def _tokens(model: nn.Module, step: int) -> Tensor:
    ids = models.tokens(step)
    if _sees(model):
        ids[ids <= IMAGE_START] = IMAGE_START + 1
        ids[: len(IMAGES), 1:6] = torch.tensor([IMAGE_START, *[IMAGE] * 4])
    return ids


def _pixels(step: int) -> Tensor:
    return torch.randn(32, 96, generator=torch.Generator().manual_seed(step))


def _laid_out(ids: Tensor, layout: str) -> Tensors:
    """Return what a model is given of some rows, by name, the sequence in the last dimension."""
    positions = torch.arange(LENGTH, device="npu").expand(len(ids), -1)
    made = {"input_ids": ids, "shift_labels": F.pad(ids, (0, 1), value=-100)[:, 1:], "position_ids": positions}
    if layout == "padded":  # row i begins behind i tokens of padding
        made["attention_mask"] = torch.ones_like(ids)
        fills = {"shift_labels": -100}
        for name, tensor in made.items():
            padded = [F.pad(row, (i, ROWS - i), value=fills.get(name, 0)) for i, row in enumerate(tensor)]
            made[name] = torch.stack(padded)
    if layout == "packed":
        made = {name: tensor.reshape(1, -1) for name, tensor in made.items()}
    return {name: tensor.contiguous().clone() for name, tensor in made.items()}
