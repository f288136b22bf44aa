"""Run by test_transformers_patch.py, in a process of its own with the patched transformers: models with its kernels.

Wants ``python -m softnpu``. The first argument is a folder for checkpoints. What each model was served is printed as
JSON, as the last line.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from kernels import get_loaded_kernels
from torch import nn
from transformers import PreTrainedModel

from tests.support import npu_counts, zoo
from tests.support.nearness import assert_same_model

torch.set_num_threads(1)
zoo.ARCHITECTURES |= {
    "llama-gelu": zoo.dense("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "qwen3-gelu": zoo.dense("Qwen3ForCausalLM", {"hidden_act": "gelu"}),
}
NAMES = ("qwen3", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss", "nanochat", "llama-gelu", "qwen3-gelu", "qwen3_next")


def load(name: str, folder: Path, **options) -> PreTrainedModel:
    """Load the model of the zoo from a checkpoint."""
    original = zoo.build(name)
    original.save_pretrained(folder / name)
    return type(original).from_pretrained(folder / name, use_kernels=True, **options)


def served(model: nn.Module) -> dict[str, str]:
    """Map a class, or the name of a function, to the layer of a kernel that has taken its place."""
    found = {type(module).__name__: module for module in model.modules()}
    for module in model.modules():
        found |= vars(module).get("_kernel_funcs", {})
    ids = {kernel.metadata.id for kernel in get_loaded_kernels()}
    layers = {}
    for name, module in found.items():
        function = getattr(vars(module).get("forward"), "__func__", None)
        if function is not None and function.__module__.partition(".")[0] in ids:
            layers[name] = function.__qualname__.partition(".")[0]
    return layers


def on_the_cpu(folder: Path) -> None:
    """Check that nothing changes there."""
    reference, model = zoo.build("qwen3"), load("qwen3", folder)
    ids = zoo.inputs("qwen3", reference)
    assert torch.equal(model(**ids).logits, reference(**ids).logits)
    assert served(model) == {}
    assert get_loaded_kernels() == []


def on_the_npu(name: str, folder: Path) -> dict:
    model = load(name, folder, device_map="npu", experts_implementation="npu_grouped_mm")
    npu_counts.reset()
    assert_same_model(name, model, zoo.build(name))
    calls = Counter(npu_counts.read())
    layers = served(model)
    model.zero_grad()
    npu_counts.reset()
    assert_same_model(name, model.train(), zoo.build(name))  # none of them has dropout
    return {"layers": layers, "training": served(model), "calls": calls, "calls in training": npu_counts.read()}


def a_wrapped_forward_stays(folder: Path) -> None:
    """Check a forward that is wrapped as tensor parallelism wraps it."""
    model = load("gemma3_text", folder, device_map="npu")
    norm = model.model.layers[0].self_attn.q_norm
    inner = norm.forward
    norm.forward = wrapper = lambda *args: inner(*args)
    model.set_use_kernels(True)
    assert norm.forward is wrapper


def main() -> None:
    folder = Path(sys.argv[1])
    assert "kernels_ext_npu" not in sys.modules
    sys.modules["kernels_ext_npu"] = None  # type: ignore[assignment]  # where it is installed it could be imported
    on_the_cpu(folder)
    results = {name: on_the_npu(name, folder) for name in NAMES}
    a_wrapped_forward_stays(folder)
    loaded = sorted(str(kernel.metadata.name) for kernel in get_loaded_kernels())
    print(json.dumps({"models": results, "kernels": loaded}))


main()
