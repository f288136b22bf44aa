"""Experts of transformers without an experts interface: the values and gradients of their own forwards."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

import softnpu
from tests.support.swapped import swapped

pytestmark = pytest.mark.usefixtures("registered")
EXPERTS, HIDDEN, INNER, TOKENS = 6, 32, 64, 21
# one sum in another order; in bfloat16 a product, a gate, a product and a sum, which round at other places
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


def llama4(top_k: int, activation: str = "silu") -> nn.Module:
    config = SimpleNamespace(
        num_experts_per_tok=top_k,
        hidden_size=HIDDEN,
        num_local_experts=EXPERTS,
        intermediate_size=INNER,
        hidden_act=activation,
    )
    return Llama4TextMoe(config)


def dbrx(activation: str) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=HIDDEN, ffn_hidden_size=INNER, moe_num_experts=EXPERTS, ffn_act_fn={"name": activation}
    )
    return DbrxExperts(config)


def step3p7(limit: float) -> nn.Module:
    config = SimpleNamespace(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu"
    )
    return Step3p7Experts(config, limit)


CASES = {
    "llama4, one expert": lambda: llama4(1),
    "llama4, two experts": lambda: llama4(2),
    "llama4, gelu": lambda: llama4(1, "gelu"),
    "dbrx": lambda: dbrx("silu"),
    "dbrx, gelu": lambda: dbrx("gelu"),
    "step3p7": lambda: step3p7(0.5),
}


def made(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = CASES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, HIDDEN**-0.5)
    return module.to(dtype)


def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    if name.startswith("llama4"):
        return [x]
    return [x, torch.rand(TOKENS, EXPERTS - 1).topk(2, -1).indices, torch.rand(TOKENS, 2).to(dtype)]


def run(module: nn.Module, given: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    found = module(*leaves)
    y = found[0] if isinstance(found, tuple) else found
    (y.float() * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    outputs = list(found) if isinstance(found, tuple) else [found]
    return [*outputs, *(t.grad for t in leaves if t.requires_grad), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_originals(name: str, dtype: torch.dtype) -> None:
    original, given = made(name, dtype), inputs(name, dtype)
    (module,) = swapped(original)
    softnpu.reset_counters()
    found = run(module, [t.npu() for t in given])
    counters = softnpu.counters()
    assert counters["npu_grouped_matmul"] > 0
    assert counters["stream_syncs"] == 0
    expected = run(original, given)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        distance = (a.detach().cpu().double() - b.detach().double()).norm()
        assert distance <= TOLERANCES[dtype] * b.detach().double().norm()


def test_llama4s_experts_compute_the_tokens_that_they_were_chosen_for_and_no_others() -> None:
    """transformers multiplies as many rows as there are tokens, times experts."""
    (module,), rows = swapped(made("llama4, one expert", torch.float32)), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.npu.npu_grouped_matmul, torch.ops.aten.bmm):
                rows.append(args[0][0].shape[0])
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        module(torch.randn(TOKENS, HIDDEN, device="npu"))
    assert rows == [TOKENS, TOKENS]


def test_hooks_of_what_is_passed_by_end_it() -> None:
    calls: list[nn.Module] = []
    for name, path in (("llama4, one expert", "experts"), ("dbrx", "mlp")):
        original = made(name, torch.float32)
        (module,), given = swapped(original), inputs(name, torch.float32)
        module.get_submodule(path).register_forward_hook(lambda module, *_: calls.append(module))
        with torch.no_grad():
            found, expected = module(*(t.npu() for t in given)), original(*given)
        assert calls
        found, expected = (each[0] if isinstance(each, tuple) else each for each in (found, expected))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
        calls.clear()


def test_choices_of_experts_elsewhere_add_nothing() -> None:
    """Step-3.7's index may be the number of experts."""
    original = made("step3p7", torch.float32)
    x, index, weights = inputs("step3p7", torch.float32)
    index[::2, 0] = EXPERTS
    with torch.no_grad():
        found, expected = swapped(original)[0](x.npu(), index.npu(), weights.npu()), original(x, index, weights)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
