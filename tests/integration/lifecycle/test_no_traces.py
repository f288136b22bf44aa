"""After restore() and unregister() transformers, kernels, torch, accelerate, peft and the models are what they were.

Every global of their modules and every attribute of their classes is compared with the object that stood there before.
"""

import json

import pytest

# what `kernels` keeps of a kernel that it has loaded
KEPT_BY_KERNELS = ("kernels.layer.layer._CACHED_LAYER", "kernels.importer._loaded_kernels")
# where torch enters an operator that a kernel defines when it is loaded
OPERATORS = ("torch.ops", "torch._library.custom_ops.OPDEF_TO_LIB", "torch.jit._builtins._builtin_table")
HANDLES = "torch.utils.hooks.RemovableHandle.next_id"  # torch counts the hooks of a process, also those that are gone
KEPT = (HANDLES, *KEPT_BY_KERNELS, *(f"new: {place}" for place in (*KEPT_BY_KERNELS, *OPERATORS)))

PRELUDE = """
import json, sys, tempfile
from pathlib import Path
import softnpu, peft, torch
import kernels_ext_npu
from kernels_ext_npu import model_configs
from kernels_ext_npu.demo import model_comparison
from tests.integration.lifecycle.traces import differences, snapshot
from transformers.integrations import hub_kernels
from transformers import AutoConfig
# files that are changed without a model of theirs
from transformers.generation.continuous_batching import continuous_api, utils
from transformers.models.sam2 import modeling_sam2

NAMES = sys.argv[1:] or model_configs.TINY
FOLDER = Path(tempfile.mkdtemp())

def load(name, **options):
    auto = model_comparison.loader(AutoConfig.from_pretrained(FOLDER / name))
    return auto.from_pretrained(FOLDER / name, dtype=torch.float32, device_map="npu", **options)

def use(model):
    made = {name: value.to("npu") for name, value in model_comparison.inputs(model.config).items()}
    model.train()
    model(**made, labels=made["input_ids"]).loss.backward()
    model.eval().generate(**made, max_new_tokens=2, do_sample=False)

# what transformers and kernels change by themselves
for name in NAMES:
    model_comparison.save(name, FOLDER / name)
    use(load(name))
hub_kernels.register_kernel_mapping_transformers()
# what torch imports when an operator is defined
import torch._subclasses.schema_check_mode
# names that transformers looks up when they are asked for
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils, masking_utils
"""

EVERY_MODEL = """
found = {}
for name in NAMES:
    before = snapshot()
    kernels_ext_npu.register(everywhere=name == "Qwen3")
    model = load(name, use_kernels=True)
    use(model)
    swapped = {row.kind for row in kernels_ext_npu.report(model) if row.swapped}
    assert {"norms", "attention"} <= swapped, name
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
    found[name] = differences(before, snapshot())
print(json.dumps(list(found.items())))
"""

# raises in the n-th call of a function of ours, as an interrupt or a lack of memory does
INTERRUPTED = """
class Stop(BaseException):
    pass

def interrupt(last):
    calls = 0
    def count(frame, event, argument):
        nonlocal calls
        if event == "call" and "/kernels_ext_npu/" in frame.f_code.co_filename:
            calls += 1
            if calls == last:
                sys.setprofile(None)
                raise Stop
    def seen():
        return calls
    return count, seen

def kernelize(model, last):
    count, seen = interrupt(last)
    sys.setprofile(count)
    try:
        kernels_ext_npu.kernelize(model)
    except Stop:
        stopped.append(last)
    finally:
        sys.setprofile(None)
    return seen()

stopped = []  # not where a generator that is closed swallows it
model = load("Qwen3-MoE")
for _ in range(2):  # the first finds out what later ones know
    kernels_ext_npu.register()
    calls = kernelize(model, None)
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
before = snapshot(model)
found = {}
for stop in range(1, calls, max(1, calls // 24)):
    kernels_ext_npu.register()
    kernelize(model, stop)
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
    found[stop] = differences(before, snapshot(model))
assert len(stopped) >= 20, calls
print(json.dumps(list(found.items())))
"""


def strange(line: str) -> dict[str, list[str]]:
    found = {name: [path for path in paths if not path.startswith(KEPT)] for name, paths in json.loads(line)}
    return {name: paths for name, paths in found.items() if paths}


def test_a_model_leaves_no_trace(run_forked) -> None:
    """With attention, norms, rotations, experts and a router: loaded, trained, restored."""
    output = run_forked(PRELUDE + EVERY_MODEL, "Qwen3-MoE").stdout
    assert strange(output.splitlines()[-1]) == {}


@pytest.mark.long
def test_neither_a_model_nor_an_interrupted_kernelize_leaves_a_trace(run_python) -> None:
    """Ten models are registered for, loaded, trained, restored; and one is kernelized up to each of two dozen calls."""
    output = run_python(PRELUDE + EVERY_MODEL + INTERRUPTED).stdout
    models, interrupted = output.splitlines()[-2:]
    assert strange(models) == {}
    assert strange(interrupted) == {}
