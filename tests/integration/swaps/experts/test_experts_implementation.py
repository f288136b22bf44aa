"""``npu_grouped_mm``: who takes it, who keeps what he asked for, and how it ends."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from kernels import get_local_kernel
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import kernels_ext_npu
import softnpu
from tests.support import memory, zoo

NAME = "npu_grouped_mm"


def load(folder: Path, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, device_map="npu", **options)


def grouped_products(model: nn.Module) -> int:
    """How many of them a forward launches: two for each experts module that is served."""
    softnpu.reset_counters()
    with torch.no_grad():
        model(torch.arange(8, device=model.device)[None])
    return softnpu.counters().get("npu_grouped_matmul", 0)


def rows(model: nn.Module) -> list[kernels_ext_npu.Row]:
    return [row for row in kernels_ext_npu.report(model) if row.kind == "experts"]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8, device=model.device)[None]).logits.cpu()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_on_the_npu_takes_it_without_being_asked(registered, checkpoint, name) -> None:
    model = load(checkpoint(name))
    assert model.config._experts_implementation == NAME
    served = rows(model)
    assert served
    assert all(row.swapped and row.kernel == "MoEExperts" and NAME in row.reason for row in served)
    assert grouped_products(model) == 2 * len(served)
    expected = logits(zoo.build(name))
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()


def test_a_model_inside_of_another_takes_it(registered) -> None:
    model = zoo.build("qwen3_vl_moe").to("npu")
    assert model.config.text_config._experts_implementation == NAME
    assert all(row.swapped for row in rows(model))


@pytest.mark.parametrize("named", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("use_kernels", [False, True])
def test_who_names_another_one_gets_it(registered, checkpoint, named, use_kernels) -> None:
    model = load(checkpoint("qwen3_moe"), experts_implementation=named, use_kernels=use_kernels)
    assert model.config._experts_implementation == named
    assert grouped_products(model) == 0
    (row, *_) = rows(model)
    assert not row.swapped
    if use_kernels:
        assert row.reason == f"the experts implementation {named} was asked for"


def test_it_can_be_named(registered, checkpoint) -> None:
    model = load(checkpoint("qwen3_moe"), experts_implementation=NAME)
    assert grouped_products(model) == 4
    model.set_experts_implementation("eager")
    assert grouped_products(model) == 0
    model.set_experts_implementation(NAME)
    assert grouped_products(model) == 4


@pytest.mark.parametrize("named", ["eager", "grouped_mm"])
def test_what_is_named_later_counts_for_swapped_modules_too(registered, checkpoint, named) -> None:
    model = load(checkpoint("qwen3_moe"), use_kernels=True)
    assert [row.reason for row in rows(model)] == [None, None]
    model.set_experts_implementation(named)
    assert grouped_products(model) == 0
    assert not any(row.swapped for row in rows(model))
    kernels_ext_npu.kernelize(model)
    assert grouped_products(model) == 0
    model.set_experts_implementation(NAME)
    assert grouped_products(model) == 4


def test_a_model_that_was_loaded_before_takes_it_when_it_is_kernelized(checkpoint) -> None:
    model = load(checkpoint("qwen3_moe"))
    assert model.config._experts_implementation == "grouped_mm"
    kernels_ext_npu.kernelize(model)
    assert all(row.swapped for row in rows(model))
    assert grouped_products(model) == 4
    kernels_ext_npu.restore(model)
    assert model.config._experts_implementation == "grouped_mm"
    assert grouped_products(model) == 0
    assert not any(hasattr(module, "_fused_moe_gate") for module in model.modules())


def test_unregister_takes_it_out_and_gives_the_default_back(checkpoint) -> None:
    before = {name: getattr(AutoModelForCausalLM, name, None) for name in ("from_pretrained",)}
    kernels_ext_npu.register()
    model, swapped = load(checkpoint("qwen3_moe")), load(checkpoint("qwen3_moe"), use_kernels=True)
    named = load(checkpoint("qwen3_moe"), experts_implementation=NAME)
    assert NAME in ALL_EXPERTS_FUNCTIONS
    kernels_ext_npu.unregister()
    assert NAME not in ALL_EXPERTS_FUNCTIONS
    assert model.config._experts_implementation == named.config._experts_implementation == "grouped_mm"
    assert grouped_products(model) == grouped_products(named) == 0
    assert grouped_products(swapped) == 4  # until it is restored
    assert grouped_products(kernels_ext_npu.restore(swapped)) == 0
    assert load(checkpoint("qwen3_moe")).config._experts_implementation == "grouped_mm"
    with pytest.raises(ValueError, match="not supported"):
        load(checkpoint("qwen3_moe"), experts_implementation=NAME)
    assert before == {name: getattr(AutoModelForCausalLM, name, None) for name in before}


def test_on_the_cpu_it_is_transformers_default(registered, checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"))
    found = logits(model)
    kernels_ext_npu.unregister()
    assert model.config._experts_implementation == "grouped_mm"
    assert torch.equal(found, logits(model))


def test_tokens_are_generated_and_the_name_is_not_saved(registered, checkpoint, tmp_path) -> None:
    model = load(checkpoint("qwen3_moe"))
    ids = torch.arange(2, 10)[None]
    options = {"max_new_tokens": 5, "do_sample": False}
    softnpu.reset_counters()
    tokens = model.generate(ids.npu(), **options)
    assert softnpu.counters()["npu_grouped_matmul"] == 5 * 4
    assert torch.equal(tokens.cpu(), zoo.build("qwen3_moe").generate(ids, **options))
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("swapped", [True, False])
def test_a_forward_that_another_library_wrapped_still_ends_in_it(registered, swapped) -> None:
    """As tensor parallelism wraps experts: the wrapper stays, and what it calls is served, by a kernel or by name."""
    model = zoo.build("qwen3_moe").to("npu")
    calls = []
    for layer in model.model.layers:
        original = layer.mlp.experts.forward

        def wrapper(*args, original=original):
            calls.append(len(args))
            return original(*args)

        layer.mlp.experts.forward = wrapper
    if swapped:
        kernels_ext_npu.kernelize(model)
    else:
        model.set_experts_implementation(NAME)
    assert grouped_products(model) == 4
    assert calls == [3, 3]
    assert all(row.swapped for row in rows(model))
    assert all(row.reason is None if swapped else NAME in row.reason for row in rows(model))


@pytest.mark.parametrize("way", ["by name", "kernelized"])
def test_weights_can_be_stored_the_other_way_around(registered, checkpoint, tmp_path, way) -> None:
    model = load(checkpoint("qwen3_moe"), use_kernels=way == "kernelized")
    expected, state = logits(model), copy.deepcopy(model.state_dict())
    before = memory.start()
    assert kernels_ext_npu.transpose_experts(model) is model
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert memory.requested("current") == before
    assert memory.requested("peak") <= before + largest
    weights = [p for name, p in model.named_parameters() if "experts" in name]
    assert all(weight.mT.is_contiguous() for weight in weights)
    assert (logits(model) - expected).norm() <= 1e-6 * expected.norm()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values()))
    model.save_pretrained(tmp_path / "transformers")
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "transformers").state_dict()
    for loaded in (saved, torch.load(tmp_path / "torch.pt", map_location="cpu")):
        assert all(torch.equal(loaded[name], value.cpu()) for name, value in state.items())
    model(torch.arange(8, device="npu")[None]).logits.sum().backward()
    assert all(weight.grad.stride() == weight.stride() for weight in weights)
    torch.optim.AdamW(model.parameters()).step()
    kernels_ext_npu.restore(model)
    assert all(weight.is_contiguous() for weight in weights)


def test_a_model_without_experts_is_told_so(registered) -> None:
    with pytest.raises(ValueError, match="transpose_experts: the model has no experts with a kernel"):
        kernels_ext_npu.transpose_experts(zoo.build("qwen3").to("npu"))


def test_strict_takes_no_for_an_answer_from_nobody(checkpoint) -> None:
    kernels_ext_npu.register(strict=True)
    with pytest.raises(RuntimeError, match="the experts implementation eager was asked for"):
        load(checkpoint("qwen3_moe"), use_kernels=True, experts_implementation="eager")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_checkpointing_gives_the_same_gradients(registered, name) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = kernels_ext_npu.kernelize(zoo.build(name).to("npu")).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(torch.arange(8, device="npu")[None], use_cache=False).logits.square().mean().backward()
        gradients.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    a, b = gradients
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kernelized", ["before", "after", "by name"])
def test_adapters_on_the_weights_of_experts_train_as_they_do_on_the_cpu(registered, kernelized) -> None:
    """peft puts a parametrisation on the weight for the time of a call: what is multiplied is no parameter then."""
    config = peft.LoraConfig(
        r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], init_lora_weights=False
    )
    models = []
    for device in ("cpu", "npu"):
        model = zoo.build("qwen3_moe").to(device)
        if device == "npu" and kernelized == "before":
            kernels_ext_npu.kernelize(model)
        models.append(peft.get_peft_model(model, config).train())
    reference, model = models
    model.load_state_dict(reference.state_dict())
    if kernelized == "after":
        kernels_ext_npu.kernelize(model)
    assert all(row.swapped for row in rows(model))
    ids = torch.arange(8)[None]
    expected = reference(ids).logits
    softnpu.reset_counters()
    found = model(ids.npu()).logits
    assert softnpu.counters()["npu_grouped_matmul"] == 4
    assert (found.cpu() - expected).norm() <= 1e-5 * expected.norm()
    for logits in (expected, found):
        logits.square().mean().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 8
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            assert (trained[name].cpu() - parameter.grad).norm() <= 1e-5 * parameter.grad.norm()


@pytest.mark.parametrize(
    ("name", "class_name"), [("llama4_text", "Llama4TextExperts"), ("longcat_flash", "LongcatFlashExperts")]
)
def test_experts_that_are_not_served_are_named(registered, name, class_name) -> None:
    model = kernels_ext_npu.kernelize(zoo.build(name).to("npu"))
    kept = [row for row in rows(model) if row.class_name == class_name]
    assert kept
    assert all((row.swapped, row.reason) == (False, "no kernel computes what its forward computes") for row in kept)


def test_a_whole_layer_compiles_in_one_graph(registered) -> None:
    torch._dynamo.reset()
    model = kernels_ext_npu.kernelize(zoo.build("qwen3_moe").to("npu"))
    block = model.model.layers[0].mlp
    x = torch.randn(2, 6, model.config.hidden_size, device="npu", requires_grad=True)
    eager = block(x)
    (expected,) = torch.autograd.grad(eager.square().sum(), x)
    y = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(y, eager)
    assert torch.equal(found, expected)


def test_tensors_may_be_made_on_the_npu_by_default(registered) -> None:
    """What is computed on the host to tell a gate says so itself."""
    model = zoo.build("qwen3_moe").to("npu")
    torch.set_default_device("npu")
    try:
        kernels_ext_npu.kernelize(model)
        assert grouped_products(model) == 4
    finally:
        torch.set_default_device(None)


def test_a_report_needs_no_kernel_that_cannot_be_loaded(checkpoint) -> None:
    """Offline, with nothing in the cache: what is wrong is said by the forward."""
    kernels_ext_npu.register(source="hub")
    model = load(checkpoint("qwen3_moe"))
    assert all(row.swapped for row in rows(model))
    with pytest.raises(ValueError, match="not available in the local cache"):
        grouped_products(model)
    kernels_ext_npu.restore(model)
    assert grouped_products(model) == 0


def test_a_kernel_that_was_loaded_twice_serves_all_the_same(registered) -> None:
    """Another load makes another package of the same name, which does not have its modules as attributes."""
    model = kernels_ext_npu.kernelize(zoo.build("qwen3_moe").to("npu"))
    get_local_kernel(Path(__file__).parents[4] / "FusedMoE" / "build" / "torch-npu")
    kernels_ext_npu.kernelize(model.train())
    assert all(row.swapped for row in rows(model))
    kernels_ext_npu.restore(model)


def test_a_module_of_ones_own_can_be_saved_whole(registered, tmp_path) -> None:
    """What a gate was found to be is no class of the kernel, which another process would have to load first."""
    model = load_experts()
    kernels_ext_npu.kernelize(model)
    assert vars(model["experts"])["_fused_moe_gate"][1] == (1.0, float("inf"), 0.0, False, False)


def load_experts() -> nn.ModuleDict:
    experts = zoo.build("qwen3_moe").model.layers[0].mlp.experts
    return nn.ModuleDict({"experts": experts}).to("npu")
