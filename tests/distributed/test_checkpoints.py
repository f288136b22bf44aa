"""What a model with kernels saves on several devices is what a model without them loads, on one or on several."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers.distributed.checkpoint import (
    consolidate_distributed_checkpoint,
    load_optimizer_distributed,
    save_optimizer_distributed,
)

from tests.distributed import engines, models
from tests.distributed.models import Tensors

pytestmark = pytest.mark.distributed

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def train(engine: str, model: str, source: Path, target: Path, kernels: bool, resumes: bool) -> tuple[Tensors, Tensors]:
    """Train a step, save in every way that the engine has, and train another one; or load that, and train the other.

    Below ``target``: ``plain`` is what torch's own functions write, ``gathered`` what save_pretrained writes, and
    where transformers splits the model, ``distributed`` and ``optimizer`` what it writes by shards.

    Returns:
        The whole weights between the steps, and those behind the second.
    """
    is_split = bool(engines.engine(engine, model).config)
    with engines.registered(kernels):
        folder = target / "distributed" if resumes and is_split else source
        whole, trained = engines.build(engine, model, folder, kernels)
        optimizer = models.make_optimizer(trained)

        def step(number: int) -> Tensors:
            ids = engines.batch(engine, model, number)
            trained(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return engines.weights(trained)

        if not resumes:
            step(0)
        if is_split and resumes:
            load_optimizer_distributed(whole, optimizer, str(target / "optimizer"))
        elif is_split:
            whole.save_pretrained(target / "distributed", distributed_checkpoint=True)
            save_optimizer_distributed(whole, optimizer, str(target / "optimizer"))
            whole.save_pretrained(target / "gathered")
        else:
            weights, moments = get_state_dict(trained, optimizer, options=FLAT)
            state = {"model": weights, "optimizer": moments}
            if resumes:
                dcp.load(state, checkpoint_id=target / "plain")
                set_state_dict(trained, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
            else:
                dcp.save(state, checkpoint_id=target / "plain")
            if engine == "DDP" and dist.get_rank() == 0 and not resumes:
                whole.save_pretrained(target / "gathered")
        dist.barrier()
        return engines.weights(trained), step(1)


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        # gate and up are packed where they are not sharded: DDP's
        ("DDP", "Qwen3"),
        ("DDP", "Llama"),
        ("FSDP1", "Gemma 3"),
        ("FSDP2", "Qwen3"),
        # experts in one tensor lie in strips under tensor parallelism, and whole under expert parallelism
        ("FSDP2, by transformers", "Qwen3"),
        ("TP", "Llama"),
        ("TP", "Qwen3-MoE"),
        ("EP, dispatch", "gpt-oss"),
    ],
)
def test_training_goes_on_where_it_was_and_one_process_loads_what_was_saved(
    engine, model, two_ranks, checkpoints, tmp_path
):
    source = checkpoints(model)
    saved, uninterrupted = two_ranks.run(train, engine, model, source, tmp_path, True, resumes=False)[0]
    assert not any(torch.equal(weight, saved[name]) for name, weight in uninterrupted.items())
    for kernels in (True, False):
        for loaded, resumed in two_ranks.run(train, engine, model, source, tmp_path, kernels, resumes=True):
            assert_equal(loaded, saved)
            if kernels:
                assert_equal(resumed, uninterrupted)
            assert not any(torch.equal(weight, saved[name]) for name, weight in resumed.items())
    if (tmp_path / "plain").exists():
        state = {"model": models.load(source).state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "plain", no_dist=True)
        assert_equal(state["model"], saved)
    else:
        consolidate_distributed_checkpoint(tmp_path / "distributed", tmp_path / "consolidated")
        for file in (tmp_path / "gathered").glob("*.json"):
            if "index" not in file.name:
                (tmp_path / "consolidated" / file.name).write_bytes(file.read_bytes())
    for folder in {"gathered", "consolidated"} & {path.name for path in tmp_path.iterdir()}:
        assert_equal(models.load(tmp_path / folder).state_dict(), saved)


def assert_equal(one: Tensors, other: Tensors) -> None:
    """To the bit: the same operators compute the same."""
    assert one.keys() == other.keys()
    different = [name for name, weight in one.items() if not torch.equal(weight, other[name])]
    assert not different
