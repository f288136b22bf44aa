"""Gate and up side by side: nobody notices, and where it cannot be the results are right all the same."""

import copy
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import kernels_ext_npu
import softnpu
from kernels_ext_npu.measuring.costs import Cost

pytestmark = pytest.mark.usefixtures("registered")
APART = "two products, since the weights do not lie side by side: kernelize(model) lays them so"
HELD = "two products, since somebody else also holds a weight, such as a state dict or a graph of autograd"
IDS = torch.randint(2, 64, (2, 7), generator=torch.Generator().manual_seed(0))


def llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def kernelized(**options) -> LlamaForCausalLM:
    return kernels_ext_npu.kernelize(llama(**options).to("npu"))


def mlps(model: nn.Module) -> list[kernels_ext_npu.Row]:
    return [row for row in kernels_ext_npu.report(model) if row.kind == "gated MLPs"]


def reasons(model: nn.Module) -> set[str | None]:
    return {row.reason for row in mlps(model)}


def storage(parameter: torch.Tensor) -> int:
    return parameter.untyped_storage().data_ptr()


def assert_own_storages(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.untyped_storage().data_ptr() == parameter.data_ptr()


def assert_equal_logits(model: nn.Module, original: nn.Module) -> None:
    """1e-6: float32 sums in another order."""
    with torch.no_grad():
        found, expected = model(IDS.npu()).logits.cpu(), original(IDS).logits
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def train(model: nn.Module, steps: int = 1, optimizer: Callable = torch.optim.SGD) -> list[torch.Tensor]:
    """The parameters after some steps, two backwards each, with clipping."""
    model.train()
    ids = IDS.to(next(model.parameters()).device)
    optimizer = optimizer(model.parameters(), lr=1e-2)
    for _ in range(steps):
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("bias", [False, True])
def test_both_lie_side_by_side_in_storages_of_their_own_and_nothing_is_held_twice(bias) -> None:
    model = llama(mlp_bias=bias).to("npu")
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    kernels_ext_npu.kernelize(model)
    assert reasons(model) == {None}
    assert torch.npu.memory_allocated() <= before
    assert [name for name, _ in model.named_parameters()] == names
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter
    for layer in model.model.layers:
        for name in ("weight", "bias") if bias else ("weight",):
            gate, up = getattr(layer.mlp.gate_proj, name), getattr(layer.mlp.up_proj, name)
            assert gate.data_ptr() + gate.nbytes == up.data_ptr()
    assert_own_storages(model)
    assert_equal_logits(model, llama(mlp_bias=bias))


def test_two_products_and_one_activation_a_layer(npu_counters) -> None:
    model = kernelized()
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 3, 32, device="npu")
    softnpu.reset_counters()
    with torch.no_grad():
        mlp(x)
    assert {k: v for k, v in npu_counters().items() if v} == {"matmul": 2, "npu_swiglu": 1}


def test_each_projection_has_a_gradient_of_its_own() -> None:
    model, original = kernelized(), llama()
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    for module, ids in ((model, IDS.npu()), (original, IDS)):
        module(ids, labels=ids).loss.backward()
    for layer, expected in zip(model.model.layers, original.model.layers):
        up = layer.mlp.up_proj.weight.grad
        assert (up.cpu() - expected.mlp.up_proj.weight.grad).norm() <= 1e-6 * up.norm()
    assert model.model.layers[0].mlp.gate_proj.weight.grad is None
    assert model.model.layers[1].mlp.gate_proj.weight.grad.shape == (64, 32)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gradients_do_not_depend_on_what_the_last_layer_kept(activation) -> None:
    """A second backward through the same graph, and two graphs at once: what was given up is computed again.

    To 5e-6: three backwards in float32 through two layers, with sums in another order.
    """
    model, original = kernelized(hidden_act=activation), llama(hidden_act=activation)
    for module, ids in ((model, IDS.npu()), (original, IDS)):
        first, second = (module(i, labels=i).loss for i in (ids, ids.flip(1)))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    for a, b in zip(model.parameters(), original.parameters()):
        assert (a.grad.cpu() - b.grad).norm() <= 5e-6 * b.grad.norm()


def test_state_dicts_go_in_and_out_and_leave_it_packed(tmp_path: Path) -> None:
    model, other = kernelized(), llama()
    other.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    model.load_state_dict(other.state_dict())
    assert reasons(model) == {None}
    assert_equal_logits(model, other)
    model.state_dict()["model.layers.0.mlp.up_proj.weight"].zero_()  # a state dict refers to the weights
    assert not model.model.layers[0].mlp.up_proj.weight.any()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 1.1 * sum(4 * p.numel() for p in model.parameters()) + 20_000


def test_state_dicts_that_are_assigned_end_the_packing_and_kernelize_restores_it() -> None:
    model, other = kernelized(), llama(hidden_act="silu")
    model.load_state_dict({name: value.npu() for name, value in other.state_dict().items()}, assign=True)
    assert reasons(model) == {APART}
    assert_equal_logits(model, other)
    assert reasons(kernels_ext_npu.kernelize(model)) == {None}
    assert_equal_logits(model, other)


def test_layers_that_share_an_mlp_lose_nothing(tmp_path: Path) -> None:
    """Each weight has two names: one of each is left."""
    model = llama().to("npu")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    kernels_ext_npu.kernelize(model)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} <= names
    assert not [name for name in names if "layers.1.mlp" in name]


def test_weights_that_are_really_tied_are_saved_once_as_ever(tmp_path: Path) -> None:
    model = kernelized(tie_word_embeddings=True)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"} <= names


def test_a_deep_copy_is_right_and_independent() -> None:
    model = kernelized()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal_logits(other, llama())
    assert reasons(kernels_ext_npu.kernelize(other)) == {None}
    assert_equal_logits(other, llama())


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded before", "loaded inside"])
def test_what_is_moved_in_inference_mode_is_what_it_was(tmp_path: Path, loaded: bool) -> None:
    """Parameters can be trained if they could before: packed, saved, unpacked and packed again."""
    original = llama()
    with torch.inference_mode(not loaded):
        model = copy.deepcopy(original).to("npu")
    with torch.inference_mode():
        kernels_ext_npu.kernelize(model)
        model.save_pretrained(tmp_path)
        kernels_ext_npu.kernelize(kernels_ext_npu.restore(model))
        assert_equal_logits(model, original)
    assert {parameter.is_inference() for parameter in model.parameters()} == {not loaded}
    assert reasons(model) == {None}
    if loaded:
        for found, expected in zip(train(model), train(original), strict=True):
            assert (found.cpu() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("act", ["save", "restore"])
def test_weights_that_lie_in_an_optimizers_buffer_stay_there(tmp_path: Path, act: str) -> None:
    """As apex's and flat optimizers lay them: what is written into the buffer reaches the model."""
    model = llama().to("npu")
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    kernels_ext_npu.kernelize(model)
    if act == "save":
        model.save_pretrained(tmp_path)
    else:
        kernels_ext_npu.restore(model)
    flat.mul_(2)
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        assert storage(parameter) == storage(flat)
        assert torch.equal(parameter.detach().flatten(), part)


def test_restored_weights_stay_where_they_are_in_storages_of_their_own() -> None:
    model = kernelized(mlp_bias=True)
    before = [storage(parameter) for parameter in model.parameters()]
    kernels_ext_npu.restore(model)
    assert [storage(parameter) for parameter in model.parameters()] == before
    assert_own_storages(model)
    assert_equal_logits(model, llama(mlp_bias=True))


@pytest.mark.parametrize("mode", [True, False])
def test_it_stays_packed_when_the_mode_changes(mode) -> None:
    model = kernelized().train(mode).train(not mode)
    assert reasons(model) == {None}


def test_tensors_that_were_cast_or_moved_are_right() -> None:
    model = kernelized()
    model.to(torch.bfloat16)
    assert reasons(model) == {APART}
    model.to(torch.float32)
    expected = llama().to(torch.bfloat16).to(torch.float32)
    assert_equal_logits(model, expected)
    model.cpu()
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert_equal_logits(kernels_ext_npu.kernelize(model.npu()), expected)
    assert reasons(model) == {None}


@pytest.mark.parametrize("before", [True, False])
def test_adapters_elsewhere_leave_gate_and_up_one_product(before) -> None:
    """On queries and values, as peft puts them by default: the MLP is the same node, trained or not."""
    models = []
    for model in (llama().to("npu"), llama()):
        if before and model.device.type == "npu":
            kernels_ext_npu.kernelize(model)
        torch.manual_seed(1)
        models.append(get_peft_model(model, LoraConfig(r=4, init_lora_weights=False)))
    model, original = models
    original.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    kernels_ext_npu.kernelize(model)
    rows = kernels_ext_npu.report(model).projections
    assert {row.path.rpartition(".")[2] for row in rows if row.kernel == "lora_linear"} == {"q_proj", "v_proj"}
    assert reasons(model) == {None}
    launches = []
    for each in (model.train(), kernelized().train().requires_grad_(False)):
        given = torch.randn(3, 32, device="npu", requires_grad=True)
        with Cost() as cost:
            mlp = next(module for path, module in each.named_modules() if path.endswith("layers.0.mlp"))
            mlp(given).sum().backward()
        launches.append(cost.launches)
    assert launches[0] == launches[1]
    assert launches[0]["matmul"] == 4  # gate with up, down, and the gradients of what they take
    assert_equal_logits(model.eval(), original)
    for found, expected in zip(train(model), train(original)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def adapted(**options) -> tuple[nn.Module, nn.Module]:
    """A model with kernels and adapters of gate and up, and the same without kernels on the CPU."""
    models = []
    for model in (llama().to("npu"), llama()):
        torch.manual_seed(1)
        config = {"target_modules": ["gate_proj", "up_proj"], "r": 4, "init_lora_weights": False} | options
        models.append(get_peft_model(model, LoraConfig(**config)))
    model, original = models
    original.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return kernels_ext_npu.kernelize(model), original


def test_gate_and_up_with_adapters_are_one_product_where_they_are_trained() -> None:
    """Which no adapter joins, nor the operator behind it: what is joined are the first factors of the adapters."""
    model, original = adapted()
    assert reasons(model) == {None}
    assert_own_storages(model)
    mlp = model.base_model.model.model.layers[0].mlp
    given = torch.randn(3, 32, device="npu", requires_grad=True)
    with Cost() as cost:
        mlp(given).sum().backward()
    assert cost.launches["cat"] == 2
    assert cost.launches["npu_swiglu"] == cost.launches["npu_swiglu_backward"] == 1
    # both weights, the first factors and down; the input, and the first factors
    assert cost.launches["matmul"] + cost.launches["mm"] == 5
    model.zero_grad()
    assert_equal_logits(model.eval(), original)
    for found, expected in zip(train(model), train(original)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    plain = model.merge_and_unload()
    assert reasons(plain) == {None}
    assert_equal_logits(plain, original.merge_and_unload())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora_dropout": 0.1}, "each adapter drops other elements of the input"),
        ({"alpha_pattern": {"up_proj": 3}}, "their adapters differ in scale"),
    ],
)
def test_gate_and_up_whose_adapters_differ_are_two_products(change, reason) -> None:
    model, original = adapted(**change)
    model.train()
    assert reasons(model) == {f"two products, since {reason}"}
    for each in (model, original):
        for module in each.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    for found, expected in zip(train(model), train(original)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_gate_with_adapters_that_is_changed_behind_it_is_not_joined() -> None:
    """Hooks of projections get and give tensors of their own; what they change is seen."""
    model, original = adapted()
    for each in (model, original):
        each.base_model.model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, y: y.mul_(2))
        each.base_model.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, y: y * 3)
    for found, expected in zip(train(model), train(original)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_quantised_weights_are_used() -> None:
    def only_mlps(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "mlp" in name

    original = llama()
    quantize_(original, Int8WeightOnlyConfig(), only_mlps)
    model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    assert reasons(model) == {"two products, since a weight is a Int8Tensor"}
    assert_equal_logits(model, original)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_a_projection_are_called(kind) -> None:
    model, calls = kernelized(), []
    hook = getattr(model.model.layers[0].mlp.up_proj, f"register_{kind}_hook")(lambda *_: calls.append(kind))
    assert [row.reason for row in mlps(model)] == [
        "two products, since a projection has hooks, which one product would pass by",
        None,
    ]
    model(IDS.npu(), labels=IDS.npu()).loss.backward()
    assert calls == [kind]
    hook.remove()
    assert reasons(model) == {None}


def test_offloaded_weights_are_fetched() -> None:
    model = accelerate.cpu_offload(llama(), execution_device=torch.device("npu", 0))
    kernels_ext_npu.kernelize(model)
    assert {row.swapped for row in mlps(model)} == {True}
    assert_equal_logits(model, llama())


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_is_no_parameter_is_used(name) -> None:
    """As FSDP has it without the original parameters: an attribute that is a view of something else."""
    model = llama().to("npu")
    for layer in model.model.layers:
        value = getattr(layer.mlp.up_proj, name)
        delattr(layer.mlp.up_proj, name)
        setattr(layer.mlp.up_proj, name, None if value is None else value.detach())
    kernels_ext_npu.kernelize(model)
    assert reasons(model) == {"two products, since a weight is no parameter"}
    assert_equal_logits(model, llama())


def test_a_weight_that_shares_its_storage_with_something_else_stays_there() -> None:
    model = llama().to("npu")
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    before = [storage(parameter) for parameter in model.parameters()]
    kernels_ext_npu.kernelize(model)
    assert [storage(parameter) for parameter in model.parameters()] == before
    assert_equal_logits(model, llama())


def test_weights_that_share_a_storage_the_other_way_round_are_two_products() -> None:
    model = llama().to("npu")
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        up.data, gate.data = torch.cat((up.detach(), gate.detach())).chunk(2)
    kernels_ext_npu.kernelize(model)
    assert reasons(model) == {"two products, since a weight is part of a larger storage"}
    assert_equal_logits(model, llama())


def test_projections_of_two_sizes_keep_their_forward() -> None:
    model = llama().to("npu")
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 1, bias=False, device="npu")
    kernels_ext_npu.kernelize(model)
    assert [row.swapped for row in mlps(model)] == [True, False]
    assert mlps(model)[1].reason == "gate_proj gives 64 values and up_proj 1"


def test_one_bias_only_is_multiplied_twice() -> None:
    model = llama().to("npu")
    model.model.layers[0].mlp.gate_proj.bias = nn.Parameter(torch.zeros(64, device="npu"))
    kernels_ext_npu.kernelize(model)
    assert [row.reason for row in mlps(model)] == ["two products, since only one projection has a bias", None]
    assert_equal_logits(model, llama())


HOLDERS = {
    "state dict": lambda model: model.state_dict(),
    "second parameter": lambda model: [nn.Parameter(parameter.data) for parameter in model.parameters()],
    "views": lambda model: [parameter.detach()[1:] for parameter in model.parameters()],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_weights_that_somebody_else_holds_stay_where_they_are(holder: str) -> None:
    """Whatever is written into the one is in the other, as without kernels, and once it is let go they are packed."""
    model = llama().to("npu")
    held = HOLDERS[holder](model)
    kernels_ext_npu.kernelize(model)
    assert reasons(model) == {HELD}
    for tensor in held.values() if isinstance(held, dict) else held:
        with torch.no_grad():
            tensor.zero_()
    for parameter in model.parameters():
        assert not parameter[1:].any()
    del tensor, held
    assert reasons(kernels_ext_npu.kernelize(model)) == {None}


@pytest.mark.parametrize("act", ["save", "restore", "train", "kernelize"])
def test_what_holds_packed_weights_goes_on_to_hold_them(tmp_path: Path, act: str) -> None:
    model = kernelized()
    held = model.state_dict()
    acts = {
        "save": lambda: model.save_pretrained(tmp_path),
        "restore": lambda: kernels_ext_npu.restore(model),
        "train": model.train,
        "kernelize": lambda: kernels_ext_npu.kernelize(model),
    }
    acts[act]()
    for tensor in held.values():
        tensor.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


def test_a_weight_between_forward_and_backward_stays_for_the_backward() -> None:
    """A graph that was made before holds views of the weights."""
    model, original = llama().to("npu"), llama()
    loss = model(IDS.npu(), labels=IDS.npu()).loss
    kernels_ext_npu.kernelize(model)
    loss.backward()
    original(IDS, labels=IDS).loss.backward()
    for a, b in zip(model.parameters(), original.parameters()):
        assert (a.grad.cpu() - b.grad).norm() <= 5e-6 * b.grad.norm()


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_weight_that_is_changed_before_the_backward_is_refused(name: str) -> None:
    model = kernelized()
    loss = model(IDS.npu(), labels=IDS.npu()).loss
    with torch.no_grad():
        getattr(model.model.layers[0].mlp, name).weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


FREED = """
import gc

import softnpu
import torch
import torch_npu

import kernels_ext_npu
from tests.integration.swaps.gate_up_layout.test_packing import llama

kernels_ext_npu.register()
for has_dlpack in (True, False):  # as in releases without it
    if not has_dlpack:
        del torch_npu._C._npu_from_dlpack
    gc.collect()
    empty = torch.npu.memory_allocated()
    model = llama(intermediate_size=4096).to("npu")
    whole = torch.npu.memory_allocated() - empty
    kernels_ext_npu.kernelize(model)
    assert torch.npu.memory_allocated() - empty <= whole
    model.to(torch.bfloat16)
    assert torch.npu.memory_allocated() - empty < 0.6 * whole  # and what the allocator rounds
    kernels_ext_npu.kernelize(model)
    model.cpu()
    gc.collect()
    assert torch.npu.memory_allocated() - empty < 0.1 * whole
    del model
"""


def test_memory_is_freed_when_both_have_left_it(run_forked) -> None:
    """In a process of its own: what other tests have left counts as memory, too."""
    run_forked(FREED)


def test_global_hooks_see_what_they_see_without_kernels() -> None:
    seen: dict[str, list[str]] = {}
    for where, model in (("npu", kernelized()), ("cpu", llama())):
        names = {module: name for name, module in model.named_modules()}
        calls = seen.setdefault(where, [])
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_, names=names, calls=calls: calls.append(names.get(module, ""))
        )
        with torch.no_grad():
            model(IDS.to(where))
        hook.remove()
    assert seen["npu"] == seen["cpu"]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=["class", "formula"])
@pytest.mark.parametrize("layout", ["three", "two"])
def test_another_activation_is_computed_at_once(activation: nn.Module, layout: str) -> None:
    """Before anybody looks at kernels again: its class says that it is another one."""
    model, original = kernelized(), llama()
    if layout == "two":
        config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        original = Phi3ForCausalLM(Phi3Config(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **config)).eval()
        model = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    for each in (model, original):
        mlp = each.model.layers[0].mlp
        setattr(mlp, "act_fn" if layout == "three" else "activation_fn", activation)
    assert_equal_logits(model, original)


def test_another_formula_of_gelu_is_computed_at_once_and_only_then(npu_counters) -> None:
    """Whichever comes first: its class is the same."""
    model, original = kernelized(hidden_act="gelu_pytorch_tanh"), llama(hidden_act="gelu_pytorch_tanh")
    for formula, launches in (("none", 0), ("tanh", 2), ("none", 0), ("tanh", 2)):
        for each in (model, original):
            for layer in each.model.layers:
                layer.mlp.act_fn = nn.GELU(approximate=formula)
        before = npu_counters().get("npu_geglu", 0)
        assert_equal_logits(model, original)
        assert npu_counters().get("npu_geglu", 0) - before == launches
