"""Gate and up side by side: nobody notices, and where it cannot be the results are right all the same."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.support import served
from tests.support.nearness import assert_near

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


mlps, reasons = partial(served.rows, kind="gated MLPs"), partial(served.reasons, kind="gated MLPs")


def assert_own_storages(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.untyped_storage().data_ptr() == parameter.data_ptr()


def assert_equal_logits(model: nn.Module, original: nn.Module) -> None:
    """1e-6: float32 sums in another order."""
    with torch.no_grad():
        assert_near(model(IDS.npu()).logits, original(IDS).logits, 1e-6)


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters after a step with clipping, behind two backwards."""
    model.train()
    ids = IDS.to(next(model.parameters()).device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def assert_trains_alike(model: nn.Module, original: nn.Module) -> None:
    """float32 sums in another order, through two layers."""
    for found, expected in zip(trained(model), trained(original), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_lie_side_by_side_and_nothing_is_held_twice(bias) -> None:
    """A restore moves nothing."""
    model = llama(mlp_bias=bias).to("npu")
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    parameters = dict(model.named_parameters())
    kernels_ext_npu.kernelize(model)
    assert reasons(model) == {None}
    assert torch.npu.memory_allocated() <= before
    assert list(dict(model.named_parameters())) == list(parameters)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter
    for layer in model.model.layers:
        for name in ("weight", "bias") if bias else ("weight",):
            gate, up = getattr(layer.mlp.gate_proj, name), getattr(layer.mlp.up_proj, name)
            assert gate.data_ptr() + gate.nbytes == up.data_ptr()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for each in (model, kernels_ext_npu.restore(model)):
        assert_own_storages(each)
        assert_equal_logits(each, llama(mlp_bias=bias))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


# ---- two products ----------------------------------------------------------------------------------------------------
def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def cast_and_back(model: nn.Module) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def hooked(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda *_: None)


def without_parameters(model: nn.Module) -> None:
    """As FSDP has it without the original parameters: an attribute that is a view of something else."""
    for layer in model.model.layers:
        value = layer.mlp.up_proj.weight.detach()
        del layer.mlp.up_proj.weight
        layer.mlp.up_proj.weight = value


def the_other_way_round(model: nn.Module) -> None:
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        up.data, gate.data = torch.cat((up.detach(), gate.detach())).chunk(2)


def flattened(model: nn.Module) -> None:
    """As ZeRO has parameters: views of one buffer, in the order of the model."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.data = part.view(parameter.shape)


def quantised(model: nn.Module) -> None:
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear) and "mlp" in name)


def one_bias(model: nn.Module) -> None:
    gate = model.model.layers[0].mlp.gate_proj
    gate.bias = nn.Parameter(torch.zeros(64, device=gate.weight.device))


OTHERWISE = ["two products, since a weight is part of a larger storage"] * 2
# what is done to a model, whether kernels are there before it, and what the report says of each layer then
CHANGES: dict[str, tuple[Callable, bool, list[str | None]]] = {
    "assigned state dict": (assigned, True, [APART] * 2),
    "cast": (cast_and_back, True, [APART] * 2),
    "hook": (hooked, True, ["two products, since a projection has hooks, which one product would pass by", None]),
    "weight that is no parameter": (without_parameters, False, ["two products, since a weight is no parameter"] * 2),
    "flat buffer": (flattened, True, [None] * 2),
    "flat buffer before": (flattened, False, [None] * 2),
    "the other way round": (the_other_way_round, False, OTHERWISE),
    "quantised": (quantised, False, ["two products, since a weight is a Int8Tensor"] * 2),
    "one bias": (one_bias, False, ["two products, since only one projection has a bias", None]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_gate_and_up_cannot_be_one_product_the_report_says_why(change: str) -> None:
    """Results are right before the model is kernelized again, and afterwards."""
    act, is_kernelized, expected = CHANGES[change]
    model, original = llama().to("npu"), llama()
    if is_kernelized:
        kernels_ext_npu.kernelize(model)
    for each in (model, original):
        act(each)
    if not is_kernelized:
        kernels_ext_npu.kernelize(model)
    assert [row.reason for row in mlps(model)] == expected
    assert_equal_logits(model, original)
    kernels_ext_npu.kernelize(model)
    assert [row.reason for row in mlps(model)] == ([None] * 2 if expected == [APART] * 2 else expected)
    assert_equal_logits(model, original)


def test_projections_of_two_sizes_keep_their_forward() -> None:
    model = llama().to("npu")
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 1, bias=False, device="npu")
    kernels_ext_npu.kernelize(model)
    assert [row.swapped for row in mlps(model)] == [True, False]
    assert mlps(model)[1].reason == "gate_proj gives 64 values and up_proj 1"


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


@pytest.mark.parametrize("move", [kernels_ext_npu.kernelize, flattened])
def test_a_weight_between_forward_and_backward_stays_for_the_backward(move: Callable) -> None:
    """A graph that was made before holds views of the weights."""
    model, original = llama().to("npu") if move is kernels_ext_npu.kernelize else kernelized(), llama()
    loss = model(IDS.npu(), labels=IDS.npu()).loss
    move(model)
    loss.backward()
    original(IDS, labels=IDS).loss.backward()
    for a, b in zip(model.parameters(), original.parameters()):
        assert_near(a.grad, b.grad, 5e-6)


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


def test_memory_of_a_packed_weight_is_freed_once_gate_and_up_have_left_it(run_forked) -> None:
    """In a process of its own: what other tests have left counts as memory, too."""
    run_forked(FREED)


# ---- adapters --------------------------------------------------------------------------------------------------------
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


def mlp_step(model: nn.Module) -> Counter[str]:
    """Return what a forward and backward of the first MLP launches."""
    mlp = next(module for path, module in model.named_modules() if path.endswith("layers.0.mlp"))
    given = torch.randn(3, 32, device="npu", requires_grad=True)
    with Cost() as cost:
        mlp(given).sum().backward()
    return cost.launches


def test_adapters_elsewhere_leave_gate_and_up_one_product() -> None:
    model, _ = adapted(target_modules=["q_proj", "v_proj"])
    rows = kernels_ext_npu.report(model).projections
    assert {row.path.rpartition(".")[2] for row in rows if row.kernel == "lora_linear"} == {"q_proj", "v_proj"}
    assert reasons(model) == {None}
    launches = mlp_step(model.train())
    assert launches == mlp_step(kernelized().train().requires_grad_(False))
    assert launches["matmul"] == 4  # gate with up, down, and the gradients of what they take


def test_gate_and_up_with_adapters_are_one_product_where_they_are_trained() -> None:
    """The first factors of the adapters are joined, and neither the weights nor the operator behind them."""
    model, original = adapted()
    assert reasons(model) == {None}
    assert_own_storages(model)
    launches = mlp_step(model)
    assert launches["cat"] == 2
    assert launches["npu_swiglu"] == launches["npu_swiglu_backward"] == 1
    # both weights, the first factors and down; the input, and the first factors; what adapters add, in each direction
    assert launches["matmul"] + launches["mm"] == 7
    model.zero_grad()
    assert_equal_logits(model.eval(), original)
    assert_trains_alike(model, original)
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
    assert_trains_alike(model, original)


def test_a_gate_with_adapters_that_is_changed_behind_it_is_not_joined() -> None:
    """Hooks of projections get and give tensors of their own; what they change is seen."""
    model, original = adapted()
    for each in (model, original):
        each.base_model.model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, y: y.mul_(2))
        each.base_model.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, y: y * 3)
    assert_trains_alike(model, original)
