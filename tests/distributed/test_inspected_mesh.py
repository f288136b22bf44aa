"""What ``kernels-ext-npu inspect`` counts for a mesh without processes is what happens on software devices."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig

import kernels_ext_npu
import softnpu
from kernels_ext_npu.inspection import inspecting, subject
from kernels_ext_npu.inspection.counting.memory import Memory
from kernels_ext_npu.inspection.mesh import Mesh
from kernels_ext_npu.measuring import roofline
from tests.support import memory
from tests.support.launches import computing
from tests.support.sizes import sizes

pytestmark = pytest.mark.distributed

BATCH, TOKENS = 2, 16


@dataclass
class Happened:
    """What the software device counted on a rank: launches by operator, calls and bytes by collective, bytes held."""

    launches: dict[str, int]
    waits: int
    collectives: dict[tuple[str, str, int], tuple[int, int]]
    peak: int
    gradients: int


def run(folder: Path, sizes: dict[str, int]) -> dict[tuple[str, str], Happened]:
    """A forward and a training step, without kernels and with them."""
    config = DistributedConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=config)
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(in_turn())
    ids = torch.arange(2, 2 + BATCH * TOKENS).reshape(BATCH, TOKENS).to("npu")
    happened = {}
    for name in (inspecting.ORIGINAL, inspecting.ALL):
        if name == inspecting.ALL:
            kernels_ext_npu.register()
            kernels_ext_npu.kernelize(model)
        for phase in ("forward", "step"):
            count(model, ids, phase)  # makes buffers
            # a thread of gloo may hold what a collective took for a moment after it has ended: the peak is the least
            happened[name, phase] = min((count(model, ids, phase) for _ in range(5)), key=attrgetter("peak"))
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
    return happened


def count(model: nn.Module, ids: Tensor, phase: str) -> Happened:
    """One forward or training step, before which no weight is gathered."""
    training = phase == "step"
    model.train(training)
    before = memory.start()
    softnpu.reset_counters()
    with torch.set_grad_enabled(training):
        output = model(input_ids=ids, use_cache=False, **({"labels": ids} if training else {}))
        if training:
            output.loss.backward()
    launches, sent = softnpu.counters(), softnpu.collectives()
    peak = memory.requested("peak") - before
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in grads)
    model.zero_grad(set_to_none=True)
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
    collectives: dict[tuple[str, str, int], tuple[int, int]] = {}
    for key, traffic in sent.items():
        name = key.operator, axis(model._mesh_manager, key.operator, key.group), key.ranks
        calls, size = collectives.get(name, (0, 0))
        collectives[name] = calls + traffic.calls, size + traffic.bytes
    waits = launches.pop("stream_syncs")
    del launches["device_to_host_copies"]
    return Happened(launches, waits, collectives, peak, gradients)


def axis(manager: Any, operator: str, name: str) -> str:
    """The axis of a group; by its ranks where it is one of an earlier mesh that is equal, which DTensor keeps."""
    order = ("ep", "tp", "fsdp", "efsdp") if operator == "all_to_all" else ("tp", "fsdp", "efsdp", "ep")
    groups = {candidate: manager.get_mesh(candidate).get_group() for candidate in order}
    group = next(group for group, known in dist.distributed_c10d._world.pg_names.items() if known == name)
    same = [candidate for candidate in order if groups[candidate] is group]
    ranks = dist.get_process_group_ranks(group)
    equal = [candidate for candidate in order if dist.get_process_group_ranks(groups[candidate]) == ranks]
    return [*same, *equal][0]


def in_turn() -> Callable[..., tuple]:
    """A hook of a router: tokens go to one expert after the other, whatever their scores are."""
    made: dict[torch.Size, Tensor] = {}

    def hook(module: nn.Module, _: Any, output: tuple) -> tuple:
        logits, scores, experts, *rest = output
        if experts.shape not in made:
            turns = torch.arange(experts.numel()).remainder(logits.shape[-1]).reshape(experts.shape)
            made[experts.shape] = turns.to(experts.device, experts.dtype)
        return logits, scores, made[experts.shape], *rest

    return hook


def without_workspace(add: Callable[..., None]) -> Callable[..., None]:
    """Count what operators give alone: those of the software device have no workspace."""
    return lambda self, tensors, workspace=0: add(self, tensors)


SIZES = sizes(64, 96, heads=4, keys=2, width=16, layers=4, words=100, num_experts_per_tok=2, tie_word_embeddings=False)
EXPERTS = {"qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32}, "gpt_oss": {"num_local_experts": 4}}


@pytest.mark.parametrize(
    ("model_type", "axes"),
    [
        ("gpt_oss", {"fsdp": 2, "ep": 2}),
        ("qwen3_moe", {"tp": 2, "fsdp": 2, "ep": 2}),
        pytest.param("llama", {"fsdp": 2}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"tp": 2}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"tp": 2, "ep": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_devices_do_what_was_counted(request, monkeypatch, tmp_path: Path, model_type: str, axes: dict) -> None:
    """Launches, host waits, collectives and peak memory, of a forward and a step, without kernels and with them."""
    monkeypatch.setattr(Memory, "add", without_workspace(Memory.add))
    ranks = request.getfixturevalue("two_ranks" if Mesh(**axes).ranks == 2 else "four_ranks")
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | EXPERTS.get(model_type, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found, chip = subject.find(str(tmp_path)), roofline.SOCS["910b3"]
    inspection = inspecting.inspect(found, chip, batch=BATCH, tokens=TOKENS, mesh=Mesh(**axes))
    on_ranks = ranks.run(run, tmp_path, axes)
    for variant in inspection.kernel_sets:
        for phase, counts in variant.counts.items():
            assert counts is not None, inspection.remarks
            predicted = {key: (calls, counts.messages[key]) for key, calls in counts.calls.items() if calls}
            for happened in (of_rank[variant.name, phase] for of_rank in on_ranks):
                assert predicted == happened.collectives
                assert computing(counts.launches) == computing(happened.launches)
                assert counts.waits == happened.waits
                # as of one device: gradients are no activations, and the device may hold a scalar more or less
                assert counts.peak - 512 <= happened.peak <= counts.peak + happened.gradients
    before, after = inspection.kernel_sets
    for phase in inspecting.PHASES:
        one, other = before.counts[phase], after.counts[phase]
        assert one is not None
        assert other is not None
        assert (one.calls, one.messages) == (other.calls, other.messages)  # kernels change no collective
        assert other.waits <= one.waits
