"""What ``kernels-ext-npu inspect`` counts for a mesh without processes is what happens on software devices."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kernels_ext_npu.inspection import inspecting, subject
from kernels_ext_npu.inspection.mesh import Mesh
from kernels_ext_npu.measuring import roofline
from tests.distributed import sharded
from tests.distributed.processes import Processes
from tests.support.launches import computing
from tests.support.sizes import sizes

SIZES = sizes(64, 96, heads=4, keys=2, width=16, layers=4, words=100, num_experts_per_tok=2, tie_word_embeddings=False)
EXPERTS = {"qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32}, "gpt_oss": {"num_local_experts": 4}}


def check(ranks: Processes, model_type: str, axes: dict[str, int], folder: Path) -> None:
    """Launches, host waits, collectives and peak memory, of a forward and a step, without kernels and with them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | EXPERTS.get(model_type, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    inspection = inspecting.inspect(
        subject.find(str(folder)),
        roofline.SOCS["910b"],
        batch=sharded.BATCH,
        tokens=sharded.TOKENS,
        mesh=Mesh(**axes),
    )
    on_ranks = ranks.run(sharded.run, folder, axes)
    for variant in inspection.variants:
        for phase, counts in variant.counts.items():
            assert counts is not None, inspection.remarks
            predicted = {key: (calls, counts.messages[key]) for key, calls in counts.calls.items() if calls}
            for happened in (of_rank[variant.name, phase] for of_rank in on_ranks):
                assert predicted == happened.collectives
                assert computing(counts.launches) == computing(happened.launches)
                assert counts.waits == happened.waits
                # as of one device: gradients are no activations, and the device may hold a scalar more or less
                assert counts.peak - 512 <= happened.peak <= counts.peak + happened.gradients
    before, after = inspection.variants
    for phase in inspecting.PHASES:
        one, other = before.counts[phase], after.counts[phase]
        assert one is not None
        assert other is not None
        assert (one.calls, one.messages) == (other.calls, other.messages)  # kernels change no collective
        assert other.waits <= one.waits


@pytest.mark.distributed
def test_two_devices_do_what_was_counted(two_ranks: Processes, tmp_path: Path) -> None:
    check(two_ranks, "gpt_oss", {"fsdp": 2, "ep": 2}, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "axes"),
    [("llama", {"fsdp": 2}), ("qwen3_moe", {"tp": 2}), ("qwen3_moe", {"tp": 2, "ep": 2})],
    ids=str,
)
def test_other_models_and_meshes_of_two(two_ranks: Processes, tmp_path: Path, model_type: str, axes: dict) -> None:
    check(two_ranks, model_type, axes, tmp_path)


@pytest.mark.distributed
def test_a_mesh_of_four_with_all_axes(four_ranks: Processes, tmp_path: Path) -> None:
    check(four_ranks, "qwen3_moe", {"tp": 2, "fsdp": 2, "ep": 2}, tmp_path)
