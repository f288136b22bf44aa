"""``kernels-ext-npu inspect --decode`` counts of a token what happens on the software device."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, Qwen3ForCausalLM, StaticCache

import kernels_ext_npu
import softnpu
from kernels_ext_npu.inspection.counting import phases, repetition
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.subject import Subject
from tests.support import zoo
from tests.support.costs import published
from tests.support.launches import computing
from tests.support.sizes import sizes

BATCH, TOKENS = 2, 12
SIZES = sizes(64, 96, heads=2, keys=1, width=64, layers=2, words=64)


def counted(config: object, model_class: type, phase: str, unlike: bool = False, hook: Any = None) -> Counts:
    """Count a step with kernels; where layers are unlike, each by itself."""
    with published(Subject("it", config, model_class, []), TOKENS, batch=BATCH) as (model, count):
        if hook is not None:
            model.model.norm.register_forward_hook(hook)
        if unlike:
            for number, layer in enumerate(model.model.layers):
                layer.label = f"like no other: {number}"
            assert repetition.find_kinds(model) == []
        return count(phase)


def happened(model: torch.nn.Module, phase: str) -> Counter[str]:
    ids = torch.full((BATCH, TOKENS), 5, device="npu")
    config = model.config
    cache = DynamicCache(config=config) if phase == phases.GROWING else StaticCache(config, max_cache_len=TOKENS + 1)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        token, place = ids[:, -1:], torch.full((BATCH, 1), TOKENS, device="npu")
        softnpu.reset_counters()
        model(input_ids=token, past_key_values=cache, use_cache=True, position_ids=place)
    return Counter(softnpu.counters())


@pytest.mark.parametrize(("name", "phase"), [
    ("qwen3", phases.STATIC),
    pytest.param("qwen3", phases.GROWING, marks=pytest.mark.long),
    pytest.param("gemma3_text", phases.GROWING, marks=pytest.mark.long),
    pytest.param("gemma3_text", phases.STATIC, marks=pytest.mark.long),
    pytest.param("qwen3_moe", phases.STATIC, marks=pytest.mark.long),
])  # fmt: skip
def test_launches_and_waits_are_those_of_the_device(registered: None, name: str, phase: str) -> None:
    real = kernels_ext_npu.kernelize(zoo.build(name, torch.bfloat16).to("npu").eval())
    expected = happened(real, phase)
    found = counted(real.config, type(real), phase)
    assert found.waits == expected.pop("stream_syncs") == 0
    del expected["device_to_host_copies"]
    assert computing(found.launches) == computing(expected)
    assert phases.replays(phase, found) == (phase == phases.STATIC)


@pytest.mark.parametrize("phase", [phases.STATIC, pytest.param(phases.GROWING, marks=pytest.mark.long)])
def test_a_few_layers_tell_what_all_cost(registered: None, phase: str) -> None:
    config = AutoConfig.for_model("qwen3", **SIZES | {"num_hidden_layers": 6})
    few, whole = (counted(config, Qwen3ForCausalLM, phase, unlike) for unlike in (False, True))
    assert +few.launches == whole.launches
    assert few.launches["npu_add_rms_norm"] == 11
    assert +few.bytes == whole.bytes


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_waits_or_copies_numbers_of_the_host_is_no_replay(registered: None, reads: bool) -> None:
    def hook(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if reads:
            return output * float(torch.arange(3, device="npu").sum().item())
        return output * torch.tensor([2.0], device="npu")

    config = AutoConfig.for_model("qwen3", **SIZES)
    found = counted(config, Qwen3ForCausalLM, phases.STATIC, hook=hook)
    assert (found.waits, found.copies_in) == ((1, 0) if reads else (0, 1))
    assert phases.replays(phases.STATIC, found) == 0
