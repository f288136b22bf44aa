"""``generate_batch`` in graphs gives the tokens of ``generate`` on the CPU, and the host waits no more often."""

import copy
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api

import kernels_ext_npu
from tests.support import npu_counts
from tests.support.attention_models import pair

NEW = 5
# of several lengths, more than the window of the models that have one, and longer together than a batch
PROMPTS = [list(range(3, 10)), [4, 5, 6], list(range(5, 44)), [7]]
PADDED = {"use_cuda_graph": True, "q_padding_interval_size": 16, "kv_padding_interval_size": 64}

pytestmark = pytest.mark.usefixtures("registered")


def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model, _ = pair(name)
    model.generation_config.eos_token_id = None
    ours = copy.deepcopy(model).to("npu")
    ours.set_attn_implementation("npu_flash_attention")
    return model, kernels_ext_npu.kernelize(ours)


def generated(model: PreTrainedModel, **options: Any) -> list[Any]:
    settings = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 48} | options
    found = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    return [found[key] for key in sorted(found)]


def tokens(outputs: list[Any]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.generated_tokens for output in outputs]


def on_the_cpu(model: PreTrainedModel) -> list[list[int]]:
    return [
        model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist() for p in PROMPTS
    ]


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.long), "gemma3"])
def test_tokens_in_graphs_are_those_of_single_prompts(name: str) -> None:
    """Models have full attention, windows beside it, or sinks."""
    model, ours = models(name)
    npu_counts.reset()
    assert tokens(generated(ours, **PADDED)) == on_the_cpu(model)
    launches = npu_counts.read(in_graphs=True)
    assert npu_counts.read()["graph_replays"] > 1
    assert launches["npu_fusion_attention_v3"] == 2 * npu_counts.read()["graph_replays"]
    assert launches["logical_not"] <= 2 * npu_counts.read()["graph_replays"]  # masks: one for each kind of layer


def test_attention_lets_the_host_wait_once_a_step_and_never_in_graphs() -> None:
    """Lengths of all kinds of layers are read together, and not at all where a step is replayed."""
    _, ours = models("gemma3")
    steps: list[tuple[int, int]] = []  # replays and waits
    original = continuous_api.ModelRunner.compute_batch

    def counted(*args: Any) -> None:
        before = npu_counts.read()
        original(*args)
        after = npu_counts.read()
        steps.append(tuple(after.get(name, 0) - before.get(name, 0) for name in ("graph_replays", "stream_syncs")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_api.ModelRunner, "compute_batch", counted)
        generated(ours)
        assert max(steps) == (0, 1)
        steps.clear()
        generated(ours, **PADDED)
        assert {waits for replays, waits in steps if replays} == {0}


def test_generate_batch_uses_no_graphs_and_no_async_batching_unless_asked() -> None:
    model, ours = models("qwen3")
    npu_counts.reset()
    assert tokens(generated(ours)) == on_the_cpu(model)
    assert "graph_replays" not in npu_counts.read()
    with pytest.raises(RuntimeError, match=r"Async batching requires a device type in .* but got device.type = 'npu'"):
        generated(ours, use_async_batching=True)


def test_a_model_that_waits_is_refused_with_its_place() -> None:
    _, ours = models("qwen3")
    ours.model.norm.register_forward_hook(lambda module, args, output: output * float(output.max() >= -9e9))
    outputs = generated(ours, **PADDED)
    for output in outputs:
        assert "continuous batching cannot capture this model: test_continuous_batching.py, line" in output.error
        assert "the host waits for the device" in output.error
        assert "Leave out use_cuda_graph" in output.error
