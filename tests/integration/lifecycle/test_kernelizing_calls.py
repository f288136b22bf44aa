"""What register(), kernelize(), report() and restore() ask of the host: imports, sources, calls.

`make benchmark` measures how long they take on a machine, and asserts nothing.
"""

import sys
from functools import partial

import pytest
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS
from tests.support.host_calls import function_calls
from tests.support.kernelizing import STEPS, dense, qwen3_235b_a22b
from tests.support.served import kernelized

FIRST = """
import inspect, sys
import softnpu, torch, transformers
from transformers import GenerationMixin, PreTrainedModel  # as every file of a model that generates
sources = []
original = inspect.getsource

def getsource(of):
    sources.append(of)
    return original(of)

inspect.getsource = getsource
known = set(sys.modules)
import kernels_ext_npu
kernels_ext_npu.register()
new = sorted(set(sys.modules) - known)
"""
REGISTERED = "print(len(sources), *new)"
KERNELIZED = """
from tests.support.kernelizing import qwen3_235b_a22b
kernels_ext_npu.report(kernels_ext_npu.kernelize(qwen3_235b_a22b({layers})))
first = len(sources)
kernels_ext_npu.report(kernels_ext_npu.kernelize(qwen3_235b_a22b({layers})))
print(first, len(sources))
"""

LOADED = """
import sys
import softnpu
import kernels_ext_npu
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=128)
LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained({folder!r})
calls, package = 0, kernels_ext_npu.__path__[0]

def count(frame, event, _):
    global calls
    calls += event == "call" and frame.f_code.co_filename.startswith(package)

def counted(call, *args, **kwargs):
    global calls, result
    calls = 0
    sys.setprofile(count)
    result = call(*args, **kwargs)
    sys.setprofile(None)
    return calls

kernels_ext_npu.register()
found = [counted(AutoModelForCausalLM.from_pretrained, {folder!r}, device_map="npu", use_kernels=True)]
model = result
found.append(len([name for name in sys.modules if name.partition(".")[0] == "kernels_ext_npu"]))
report, restore = kernels_ext_npu.report, kernels_ext_npu.restore
found += [counted(call) for call in (lambda: report(model), lambda: report(model), model.train, model.eval)]
assert all(row.swapped for row in report(model))
print(*found, counted(restore, model))
"""


def test_sources_are_read_once_a_class_and_for_models_only(run_forked) -> None:
    """However many layers there are, and none by register(), which imports this package and a registry."""
    # with a variable: in a process that has imported torch, and nothing that register() could import
    registered = run_forked(FIRST + REGISTERED, HF_HUB_OFFLINE="1")
    kernelized = [run_forked(FIRST + KERNELIZED.format(layers=layers)) for layers in (2, 94)]
    read, *modules = registered.stdout.split()
    assert read == "0"
    others = {name for name in modules if name.partition(".")[0] not in ("kernels_ext_npu", "packaging")}
    assert others <= {"transformers.masking_utils"}  # where the mask of an attention implementation is registered
    # what classes are compared with, before there is a model
    light = {f"kernels_ext_npu.patterns{file}" for file in ("", ".pattern")}
    assert {name for name in modules if name.startswith("kernels_ext_npu.patterns")} <= light
    few, many = ([int(word) for word in result.stdout.split()] for result in kernelized)
    print(f"register() imports {len(modules)} modules; a model and its report read {few}")
    assert few == many
    assert few[0] == few[1] > 0  # of another model of the same classes
    assert few[0] < len(PATTERNS) + len(FUNCTION_PATTERNS)  # only of those in the words of a class of the model


def test_the_first_model_of_a_process_asks_for_what_it_needs(run_forked, tmp_path) -> None:
    """Two layers of Llama: it was 4,509 calls of this package, 111 modules of it, and 5,563 calls for a report.

    A second report was 1,932, a switch of modes 490, and to restore the model 453.
    """
    counted = run_forked(LOADED.format(folder=str(tmp_path)), HF_HUB_OFFLINE="1").stdout
    print(f"calls to load, modules, calls for a report, another, train(), eval(), restore(): {counted}")
    calls, modules, first, report, train, evaluate, restore = map(int, counted.split())
    assert 0 < calls <= 2000
    assert 0 < modules <= 90
    assert 0 < report <= 800
    assert report < first <= 2000
    assert 0 < train <= 400
    assert 0 < evaluate <= 400
    assert 0 < restore <= 400


def test_register_looks_at_no_model(registered) -> None:
    def again() -> None:
        kernels_ext_npu.unregister()
        kernels_ext_npu.register()

    model = kernels_ext_npu.kernelize(qwen3_235b_a22b(2))
    kernels_ext_npu.restore(model)  # what it has imported stays
    again()
    before = function_calls(again)
    kernels_ext_npu.kernelize(model)
    again()
    assert function_calls(again) == before
    kernels_ext_npu.restore(model)


def test_a_mode_switch_looks_at_what_depends_on_the_mode(registered) -> None:
    """Under 500 calls of this package for two layers of Llama: it was 4,575 when every switch swapped all again."""
    model = kernelized("llama").train().eval()
    package, calls = kernels_ext_npu.__path__[0], []
    sys.setprofile(lambda frame, event, _: event == "call" and package in frame.f_code.co_filename and calls.append(1))
    model.train()
    sys.setprofile(None)
    assert 0 < len(calls) < 500


@pytest.mark.parametrize("build", [qwen3_235b_a22b, pytest.param(dense, marks=pytest.mark.long)])
def test_every_layer_costs_the_same(registered, build) -> None:
    """Calls of Python functions: 12 layers more are 12 times one more, to a tenth."""

    def calls(step, model: PreTrainedModel) -> int:
        return function_calls(partial(step, model))[0]

    with FakeTensorMode(allow_non_fake_inputs=True):
        first = kernels_ext_npu.kernelize(build(1))  # what is done once
        str(kernels_ext_npu.report(first))
        kernels_ext_npu.restore(first)
        models = [build(layers).train() for layers in (12, 24, 94)]
        served = kernels_ext_npu.report(kernels_ext_npu.kernelize(models[-1]))
        assert all(row.swapped for row in served)
        # four norms, a rotary call, attention, and a router and experts or an MLP each; a norm, a table, a head
        assert len(served) == 94 * (8 if build is qwen3_235b_a22b else 7) + 3
        kernels_ext_npu.restore(models[-1])
        for name, step in STEPS.items():
            few, more, many = (calls(step, model) for model in models)
            each, each_later = (more - few) / 12, (many - more) / 70
            print(f"{build.__name__}, {name}: {each:.0f} calls a layer, later {each_later:.0f}")
            assert each_later <= 1.1 * each
