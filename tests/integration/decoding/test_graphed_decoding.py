"""``generate`` in graphs gives the tokens of ``generate`` without them, or says why it cannot."""

import copy
import gc
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CompileConfig

import kernels_ext_npu
from kernels_ext_npu import model_configs
from kernels_ext_npu.demo import model_comparison
from tests.support import npu_counts, zoo
from tests.support.nearness import assert_each_near
from tests.support.served import kernelized

GRAPHS = CompileConfig(backend="NPUGraph")
NEW = 9

pytestmark = pytest.mark.usefixtures("registered")

# Model types that cannot be, by what is said of them. All others of the zoo that generate with a static cache can.
REFUSED = {
    name: said
    for said, names in {
        "modeling_.*.py, line .*: copy_: the host waits": "gemma3n_text falcon falcon-grouped jetmoe phimoe",
        "modeling_.*.py, line .*: nonzero: the host waits": "longcat_flash",
        "masking_utils.py, line .*: _local_scalar_dense: the host waits": "t5 mt5 t5gemma",
        "every step changes what Python keeps, .*: model.model.layers.0.temporal_block.conv1d_state": "recurrent_gemma",
        "pass cache_implementation='static'": "mpt rwkv minimax",
    }.items()
    for name in names.split()
}


def prompts(name: str, model: nn.Module, length: int = 5) -> dict[str, Tensor]:
    made = zoo.inputs(name, model, length=length)
    return {key: value for key, value in made.items() if key != "decoder_input_ids"}


def generate(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(5)
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "cache_implementation": "static", "pad_token_id": 0}
    return model.generate(**inputs, **fixed | options)


def replays(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> int:
    """Compare tokens in graphs with those without, and return how many steps were replays."""
    expected = generate(model, inputs, **options)
    npu_counts.reset()
    assert generate(model, inputs, compile_config=GRAPHS, **options).tolist() == expected.tolist()
    return npu_counts.read().get("graph_replays", 0)


# Of NEW tokens the prefill makes one, and the first step of a shape is not replayed: with windows, which hold 4 tokens,
# there are two until they are full.
@pytest.mark.parametrize(
    ("name", "length", "steps"),
    [("qwen3", 5, NEW - 2), ("gemma3_text", 5, NEW - 2), ("gemma3_text", 2, NEW - 3), ("qwen3_next", 5, NEW - 2)],
)
def test_sampled_tokens_are_those_without_graphs(name: str, length: int, steps: int) -> None:
    model = kernelized(name)
    assert replays(model, prompts(name, model, length), do_sample=True) == steps


def test_one_model_generates_again_and_again() -> None:
    model = kernelized("qwen3")
    inputs = prompts("qwen3", model)
    assert replays(model, inputs, do_sample=False) == NEW - 2
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :3] = 0
    assert replays(model, inputs, do_sample=True) == NEW - 2
    assert replays(model, prompts("qwen3", model, length=9), do_sample=True, max_new_tokens=15) == 13


def test_adapters_are_switched_in_between() -> None:
    from peft import LoraConfig

    model = kernelized("qwen3")
    for name in ("first", "second"):
        config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model.add_adapter(config, adapter_name=name)
    inputs, found = prompts("qwen3", model), []
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        assert replays(model, inputs, do_sample=True) == NEW - 2
        found.append(generate(model, inputs, compile_config=GRAPHS, do_sample=True).tolist())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("name", ["t5", "recurrent_gemma"])
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    model = kernelized(name)
    with pytest.raises(RuntimeError, match=REFUSED[name]):
        generate(model, prompts(name, model), compile_config=GRAPHS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_implementation": None}, "pass cache_implementation='static' too"),
        ({"num_beams": 2}, "graphs are for greedy_search and sample, and this is beam_search"),
        ({"prompt_lookup_num_tokens": 2, "cache_implementation": None}, "this is assisted_generation"),
    ],
)
def test_what_no_graph_could_decode_is_refused(options: dict[str, Any], said: str) -> None:
    model = kernelized("qwen3")
    with pytest.raises(ValueError, match=re.escape(said)):
        generate(model, prompts("qwen3", model), compile_config=GRAPHS, **options)


def test_a_step_launches_nothing_but_its_graph() -> None:
    model = kernelized("qwen3")
    inputs = prompts("qwen3", model)
    counts = []
    for new in (4, 4, 5):  # the first captures
        npu_counts.reset()
        found = generate(model, inputs, compile_config=GRAPHS, max_new_tokens=new, min_new_tokens=None)
        assert found.shape[1] == inputs["input_ids"].shape[1] + new
        counts.append(npu_counts.read())
    more = {k: v - counts[1].get(k, 0) for k, v in counts[2].items() if v != counts[1].get(k, 0)}
    assert more.pop("graph_replays") == 1
    assert not {"matmul", "npu_rms_norm"} & more.keys()
    launched = npu_counts.read(in_graphs=True)
    norms = launched["npu_rms_norm"] + launched["npu_add_rms_norm"]
    assert norms == 3 * 9  # steps, and norms of two layers and the model


def test_no_garbage_is_collected_while_a_graph_is_captured() -> None:
    """What it ends may wait for the device, in a destructor: the process would abort."""
    model = kernelized("llama")
    collected = []

    def note(*_: Any) -> None:
        collected.append(torch.npu.is_current_stream_capturing())

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        assert replays(model, prompts("llama", model)) > 0
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert collected
    assert not any(collected)
    assert gc.isenabled()


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_model_of_the_zoo_decodes_in_graphs_or_says_why_not(name: str) -> None:
    if not zoo.can_generate(name):
        pytest.skip("it does not generate")
    model = kernelized(name)
    inputs = prompts(name, model)
    try:
        generate(model, inputs)
    except (AttributeError, KeyError, RuntimeError):
        pytest.skip("it does not generate with a static cache")
    if name in REFUSED:
        with pytest.raises((RuntimeError, ValueError), match=REFUSED[name]):
            generate(model, inputs, compile_config=GRAPHS)
    else:
        assert replays(model, inputs, do_sample=True) > 0


# ---- the demo's models at their very first call ----------------------------------------------------------------------
# Both are float32, with sums in another order: the demo's own tolerance.
assert_close = partial(assert_each_near, tolerance=1e-5)
QUICK = {"Qwen3", "gpt-oss"}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in model_configs.TINY]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = model_configs.config(name)
    return model_comparison.loader(config).from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_first_call_prepares_is_lost_in_a_graph(name: str) -> None:
    """What is kept of a captured call holds nothing until a replay: later calls would find that."""
    model = build(name)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu"))
    ids = [torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected = [model(one, use_cache=False).logits for one in ids]
    given, graph = ids[0].npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = ours(given, use_cache=False).logits
    assert_close(ours(ids[0].npu(), use_cache=False).logits, expected[0])
    for one, other in zip(ids, expected):
        given.copy_(one)
        graph.replay()
        assert_close(captured, other)
    assert_close(ours(ids[1].npu(), use_cache=False).logits, expected[1])
