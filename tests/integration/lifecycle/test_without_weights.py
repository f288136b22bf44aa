"""A model on meta, before its weights are there: it takes the kernels for the NPU, and has them when it is loaded."""

import warnings

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import kernels_ext_npu
from tests.support import npu_counts, zoo
from tests.support.nearness import assert_near
from tests.support.served import kernelized, reasons, rows, swapped

pytestmark = pytest.mark.usefixtures("registered")
NAMES = ["qwen3", "qwen3_moe", "gemma3_text", "deepseek_v3", "phi3"]
WAITS = "two products, since its weights are on meta: once they are loaded kernelize(model) lays them side by side"
APART = "two products, since the weights do not lie side by side: kernelize(model) lays them so"


def on_meta(name: str) -> PreTrainedModel:
    reference = zoo.build(name)
    with torch.device("meta"):
        return type(reference)._from_config(reference.config).eval()


def load(model: PreTrainedModel, reference: PreTrainedModel, assign: bool = False, device: str = "npu") -> None:
    """Weights as state dicts hold them, and the frequencies of rotary embeddings, which those leave out."""
    if assign:
        state = {name: tensor.npu() for name, tensor in reference.state_dict().items()}
        model.load_state_dict(state, assign=True)
        for name, buffer in reference.named_buffers():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, buffer.npu())
        return
    model.to_empty(device=device).load_state_dict(reference.state_dict())
    for buffer, expected in zip(model.buffers(), reference.buffers()):
        buffer.copy_(expected)


def swapped_by_path(model: PreTrainedModel) -> dict[str, bool]:
    return {row.path: row.swapped for row in kernels_ext_npu.report(model)}


def assert_equal_logits(name: str, model: PreTrainedModel) -> None:
    assert_near(zoo.logits(name, model), zoo.logits(name, zoo.build(name)))


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_swapped_on_meta_is_swapped_once_it_is_loaded(name, assign) -> None:
    reference, model = zoo.build(name), kernels_ext_npu.kernelize(on_meta(name))
    assert all(parameter.is_meta for parameter in model.parameters())
    on_meta_swapped = swapped_by_path(model)
    load(model, reference, assign)
    loaded_first, calls = kernelized(name), []
    for each in (model, loaded_first):
        npu_counts.reset()
        assert_equal_logits(name, each)
        calls.append([npu_counts.read().get(of, 0) for of in ("npu_rms_norm", "npu_rotary_mul", "npu_grouped_matmul")])
        assert swapped_by_path(each) == on_meta_swapped
    assert calls[0] == calls[1]


def test_mlps_say_that_they_wait_and_are_packed_by_the_next_kernelize() -> None:
    model = kernels_ext_npu.kernelize(on_meta("qwen3"))
    assert reasons(model, "gated MLPs") == {WAITS}
    load(model, zoo.build("qwen3"))
    assert reasons(model, "gated MLPs") == {APART}
    assert_equal_logits("qwen3", model)
    kernels_ext_npu.kernelize(model)
    assert reasons(model, "gated MLPs") == {None}
    assert_equal_logits("qwen3", model)


def test_a_change_of_mode_keeps_the_kernels_and_warns_of_nothing() -> None:
    model = kernels_ext_npu.kernelize(on_meta("gemma3_text"))
    for change in (model.train, model.eval):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            change()
        assert swapped(model) == {True}
    load(model.train(), zoo.build("gemma3_text"))
    model.eval()
    assert reasons(model, "gated MLPs") == {None}  # transformers kernelizes it then


def test_use_kernels_on_meta_swaps_too(checkpoint) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), device_map="meta", use_kernels=True)
    assert swapped(model) == {True}


def test_buffers_that_were_made_on_the_cpu_are_no_obstacle(checkpoint) -> None:
    """accelerate's own way to large models."""
    reference = zoo.build("qwen3")
    with accelerate.init_empty_weights():
        model = type(reference)._from_config(reference.config).eval()
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    kernels_ext_npu.kernelize(model)
    assert swapped(model) == {True}
    model = accelerate.load_checkpoint_and_dispatch(model, checkpoint("qwen3"), device_map={"": "npu:0"})
    assert swapped(model) == {True}
    assert_equal_logits("qwen3", model)


def test_who_loads_it_on_the_cpu_gets_the_original() -> None:
    model, reference = kernels_ext_npu.kernelize(on_meta("qwen3_moe")), zoo.build("qwen3_moe")
    load(model, reference, device="cpu")
    assert_equal_logits("qwen3_moe", model)


def test_one_module_on_meta_in_a_model_on_the_npu_keeps_its_forward() -> None:
    model = zoo.build("qwen3").to("npu")
    model.model.layers[0].mlp.to("meta")
    kernels_ext_npu.kernelize(model)
    row_on_meta, other = rows(model, "gated MLPs")
    assert "it is on meta" in row_on_meta.reason
    assert other.swapped


def test_a_model_that_is_partly_on_meta_and_nowhere_on_the_npu_is_refused() -> None:
    model = zoo.build("qwen3")
    model.model.layers[0].to("meta")
    with pytest.raises(ValueError, match="the model is on cpu, meta; move it first"):
        kernels_ext_npu.kernelize(model)


def test_strict_speaks_of_what_will_never_be_swapped_only() -> None:
    kernels_ext_npu.register(strict=True)
    kernels_ext_npu.kernelize(on_meta("qwen3"))
    model = on_meta("qwen3")
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(RuntimeError, match=r"1 modules .*\n.*layers\.0\.mlp .*its activation is ReLU"):
        kernels_ext_npu.kernelize(model)
