"""can_torch_compile and has_backward are true: whole graphs, forward and backward, and fake tensors."""

from types import ModuleType

import pytest
import torch
from torch import nn

import softnpu

LAYERS = [
    "RMSNorm",
    "RMSNormCastLast",
    "RMSNormZeroCentered",
    "RMSNormWeightless",
    "T5LayerNorm",
    "RMSNormGated",
    "RMSNormGatedCastLast",
    "MambaRMSNormGated",
    "LayerNorm",
    "LayerNormFloat32",
    "AddLayerNorm",
]
HYPER_CONNECTIONS = ["HyperConnection", "HyperHead", "IndependentHyperConnection"]  # test_hyper_connections.py
OPERATORS = {  # the others: npu_rms_norm
    "LayerNorm": "native_layer_norm",
    "LayerNormFloat32": "native_layer_norm",
    "AddLayerNorm": "npu_add_layer_norm",
}


def module(kernel: ModuleType, layer: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = getattr(kernel.layers, layer)()
    if layer == "AddLayerNorm":
        made.dense, made.dropout = nn.Linear(16, 16, dtype=dtype), nn.Dropout(0.0)
        made.LayerNorm = nn.LayerNorm(16, dtype=dtype)
    elif layer != "RMSNormWeightless":
        made.weight = nn.Parameter(torch.randn(16, dtype=dtype))
        if layer == "LayerNorm":
            made.bias = nn.Parameter(torch.randn(16, dtype=dtype))
    made.variance_epsilon = 1e-6
    return made if torch.get_default_device().type == "npu" else made.to("npu")


def arguments(layer: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    count = 2 if "Gated" in layer or layer == "AddLayerNorm" else 1
    return [torch.randn(2, 3, 16).to(dtype).to("npu").requires_grad_() for _ in range(count)]


def test_the_list_is_complete(kernel: ModuleType) -> None:
    defined = {n for n, v in vars(kernel.layers).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    assert {name for name in defined if not name.startswith("_")} == {*LAYERS, *HYPER_CONNECTIONS}
    for layer in (*LAYERS, *HYPER_CONNECTIONS):
        assert getattr(kernel.layers, layer).can_torch_compile
        assert getattr(kernel.layers, layer).has_backward


@pytest.mark.parametrize(
    ("layer", "dtype", "dynamic"),
    [(layer, *((torch.float32, False), (torch.bfloat16, True))[i % 2]) for i, layer in enumerate(LAYERS)],
)
def test_compiles_to_one_graph_with_the_same_results(kernel: ModuleType, layer, dtype, dynamic) -> None:
    torch._dynamo.reset()
    eager, compiled = module(kernel, layer, dtype), module(kernel, layer, dtype)
    compiled.forward = torch.compile(compiled.forward, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for made in (eager, compiled):
        inputs = arguments(layer, dtype)
        y = made(*inputs)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in inputs), *(p.grad for p in made.parameters())])
    for a, b in zip(*results):
        assert torch.equal(a, b)
    softnpu.reset_counters()
    with torch.no_grad():
        compiled(*arguments(layer, dtype))
    assert softnpu.counters()[OPERATORS.get(layer, "npu_rms_norm")] == 1


def test_add_compiles_in_inference_and_training(kernel: ModuleType) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(kernel.add_rms_norm, fullgraph=True, backend="aot_eager")
    tensors = [torch.randn(s, device="npu") for s in ((3, 16), (3, 16), (16,))]
    for needed in (False, True):
        leaves = [t.detach().requires_grad_(needed) for t in tensors]
        for a, b in zip(compiled(*leaves, 1e-6), kernel.add_rms_norm(*leaves, 1e-6)):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
