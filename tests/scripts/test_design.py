"""`docs/design.md`: the way of a model and the worth of each mechanism are those of the code.

Its figures stand in ``tests/data/rent.json``; some of them are counted anew here.
"""

import json
from importlib import import_module
from pkgutil import resolve_name

import pytest

import kernels_ext_npu
from documents import rent
from documents.mechanisms import MECHANISMS, STEP, TOKEN, Mechanism
from documents.way import WAY
from tests.support.counted import pinned_release_only

BY_NAME = {mechanism.name: mechanism for mechanism in MECHANISMS}
RECORD = json.loads(rent.RECORD.read_text("utf-8"))
WALK = """
import inspect, json, sys
from importlib import import_module
import softnpu, torch
import kernels_ext_npu
from transformers import LlamaConfig, LlamaForCausalLM
import kernels_ext_npu.lifecycle.pipeline

places = {}
for place in json.loads(sys.argv[1]):
    module, _, name = place.partition(":")
    places[inspect.unwrap(getattr(import_module(f"kernels_ext_npu.{module}"), name)).__code__] = place
seen = {}  # each place, when it was first passed

def look(frame, event, argument):
    if event == "call" and frame.f_code in places:
        seen.setdefault(places[frame.f_code])

config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
model = LlamaForCausalLM(config).to("npu")
sys.setprofile(look)
kernels_ext_npu.register()
kernels_ext_npu.kernelize(model)
model(torch.tensor([[1, 2, 3]], device="npu"))
kernels_ext_npu.report(model)
kernels_ext_npu.restore(model)
sys.setprofile(None)
print(json.dumps(list(seen)))
"""


@pytest.mark.parametrize("step", WAY, ids=lambda step: step.name)
def test_the_functions_of_each_step_are_there(step) -> None:
    for place in step.functions:
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(f"kernels_ext_npu.{module}"), name))


def test_the_picture_of_the_way_has_its_steps() -> None:
    picture = (rent.ROOT / "docs" / "design.md").read_text("utf-8").split("```")[1]
    assert not [step.name for step in WAY if step.name not in picture and step.name != "enter"]


def test_a_model_goes_the_way_in_its_order(run_forked) -> None:
    """Each step begins with the first of its functions: they are called in the order of the steps."""
    first_of_each = [step.functions[0] for step in WAY]
    result = run_forked(WALK, json.dumps(first_of_each))
    assert json.loads(result.stdout.splitlines()[-1]) == first_of_each


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_a_mechanism_is_made_of_files_and_can_be_left_out(mechanism: Mechanism) -> None:
    assert all(path.is_file() for path in mechanism.paths)
    assert mechanism.off or mechanism.without
    before = [resolve_name(place) for place, _ in mechanism.off]
    with mechanism.left_out():
        assert not any(resolve_name(place) is found for (place, _), found in zip(mechanism.off, before))
    assert [resolve_name(place) for place, _ in mechanism.off] == before


@pinned_release_only
@pytest.mark.parametrize(
    ("name", "act"),
    [
        (None, STEP),
        ("gate and up as one product", STEP),
        pytest.param("the head without logits", STEP, marks=pytest.mark.long),
        pytest.param("sums with the norm behind them", TOKEN, marks=pytest.mark.long),
    ],
)
def test_figures_are_those_that_are_counted_now(name: str | None, act: str) -> None:
    """Of the smallest model; `make docs` counts all where they are not, and docs/design.md has them."""
    kernels_ext_npu.unregister()
    assert rent.count("Qwen3-0.6B", act, BY_NAME.get(name)) == RECORD["Qwen3-0.6B"][name or ""][act]
