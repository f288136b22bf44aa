"""Experts of transformers without an experts interface: the values and gradients of their own forwards."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from tests.support import npu_counts
from tests.support.swapped import assert_agree, moved, results, swapped

pytestmark = pytest.mark.usefixtures("registered")
EXPERTS, HIDDEN, INNER, TOKENS = 6, 32, 64, 21
# one sum in another order; in bfloat16 a product, a gate, a product and a sum, which round at other places
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


SIZES = {"hidden_size": HIDDEN, "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS}
SIZES |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), INNER)


def config(**own: object) -> SimpleNamespace:
    return SimpleNamespace(**SIZES | {"hidden_act": "silu"} | own)


CASES = {
    "llama4, one expert": lambda: Llama4TextMoe(config(num_experts_per_tok=1)),
    "llama4, two experts": lambda: Llama4TextMoe(config(num_experts_per_tok=2)),
    "llama4, gelu": lambda: Llama4TextMoe(config(num_experts_per_tok=1, hidden_act="gelu")),
    "dbrx": lambda: DbrxExperts(config(ffn_act_fn={"name": "silu"})),
    "dbrx, gelu": lambda: DbrxExperts(config(ffn_act_fn={"name": "gelu"})),
    "step3p7": lambda: Step3p7Experts(config(), 0.5),
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


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_originals(name: str, dtype: torch.dtype) -> None:
    original, given = made(name, dtype), inputs(name, dtype)
    (module,) = swapped(original)
    npu_counts.reset()
    found = results(module, *moved(given))
    counters = npu_counts.read()
    assert counters["npu_grouped_matmul"] > 0
    assert counters["stream_syncs"] == 0
    assert_agree(found, results(original, *given), TOLERANCES[dtype])


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
            found, expected = module(*moved(given)), original(*given)
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
