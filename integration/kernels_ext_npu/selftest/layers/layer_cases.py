"""Every layer of the repositories on modules that it serves, against their own forward in float64 on the host."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.activations import FastGELUActivation, NewGELUActivation, QuickGELUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kernels_ext_npu.catalogue import LAYERS, NORMS, ROUTERS
from kernels_ext_npu.patterns import rope_tables
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.cases import Layer
from kernels_ext_npu.selftest.comparing import Results
from kernels_ext_npu.selftest.functions import linear_attention
from kernels_ext_npu.selftest.layers import bare_modules, moe_blocks_v4, rotary_arguments
from kernels_ext_npu.selftest.layers.bare_modules import example, original
from kernels_ext_npu.swaps.gate_up_layout import WITH_GATE_AND_UP

Made = tuple[nn.Module, tuple[Tensor, ...]]
EXPERTS = {Qwen3MoeExperts: "qwen3_moe", GptOssExperts: "gpt_oss"}


def _random(module: nn.Module, *shapes: tuple[int, ...], mean: float = 0.0, deviation: float = 0.3) -> Made:
    """Give a module random weights, and draw what it is called with."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean, deviation)
    return module, tuple(torch.randn(shape) for shape in shapes)


def _norm(layer: str, name: str | None = None, **members: Any) -> Made:
    module = bare_modules.norm(example(layer) if name is None else original(name), **members)
    return _random(module, *[(4, 6, 32)] * (1 + ("Gated" in layer)), mean=0.3, deviation=0.5)


def _seeded(make: Callable[[], nn.Module], inputs: int = 1, scale: float = 1.0) -> Made:
    torch.manual_seed(0)
    return make().eval(), tuple(scale * torch.randn(2, 5, 32) for _ in range(inputs))  # nothing is dropped


def _layer_norm(name: str) -> Made:
    return _seeded(lambda: bare_modules.norm(original(name)))


def _mlp(layer: str, act: str, name: str | None = None, scale: float = 1.0) -> Made:
    cls = example(layer) if name is None else original(name)
    return _seeded(lambda: bare_modules.mlp(cls, 32, 64, act), scale=scale)


def _recurrent_unit() -> Made:
    module, (x,) = _random(bare_modules.recurrent_unit(2, 16), (2, 40, 16), deviation=0.5)
    return module, (x, torch.arange(40).expand(2, -1))


def _hyper_connection(name: str) -> Made:
    return _random(bare_modules.hyper_connection(name, 16), STREAMS)


def _experts(cls: type[nn.Module]) -> Made:
    """With experts of which one gets no token."""
    config = AutoConfig.for_model(EXPERTS[cls], hidden_size=32, intermediate_size=64, moe_intermediate_size=64)
    config.num_experts = config.num_local_experts = 6
    config._experts_implementation = "eager"
    module, _ = _random(cls(config), deviation=32**-0.5)
    return module, (torch.randn(24, 32), torch.rand(24, 5).topk(2, -1).indices, torch.rand(24, 2))


def _router(layer: str) -> Made:
    """With logits that no rounding puts into another order: each token is near to one row of the weight."""
    module = bare_modules.router(example(layer), 8, 8, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.eye(8) if parameter.shape == (8, 8) else torch.zeros(parameter.shape))
    tokens = torch.stack([torch.arange(8).roll(i) / 4 for i in range(12)])
    given = list(inspect.signature(module.forward).parameters)[1:]
    return module, (
        tokens.view(3, 4, 8) if layer == "SigmoidTopKRouterLinear" else tokens,
        *[torch.zeros(8)] * len(given),
    )


def _without_interface(layer: str) -> Made:
    module = bare_modules.experts(layer, 8, 8, 32)
    _, (tokens, *_) = _router("SoftmaxTopKRouter")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.eye(8) if "router" in name else torch.randn(parameter.shape) / 3)
    if layer == "ScaledTokensMoEBlock":
        return module, (tokens,)
    return module, (tokens, torch.rand(12, 8).topk(2, -1).indices, torch.rand(12, 2))


def _block(cls: type[nn.Module]) -> Made:
    return _random(cls(32, 8, 2, 32), (1, 10, 32))


# activation -> layers of MLPs with it
MLPS = {
    "silu": (
        *("SwiGLUMLP", "FusedSwiGLUMLP", "ClampedSwiGLUMLP", "ScaledSwiGLUMLP"),
        *("DroppedMLP", "GloballyScaledMLP", "FusedMLPByLayer"),
    ),
    "gelu_pytorch_tanh": ("GeGLUMLP", "FusedGeGLUMLP"),
    "gelu": ("ExactGeGLUMLP", "FusedExactGeGLUMLP", "FusedDropoutMLP", "FusedAdaptedMLP"),
}
STREAMS = (2, 5, 4, 16)  # they decide weights, of which none is near zero or one
# layer -> modules that it serves, each with arguments; images have pixels behind the last patch
MODULES: dict[str, list[Callable[[], Made]]] = {
    **{layer: [partial(_norm, layer)] for layer in NORMS.layers},
    "MambaRMSNormGated": [
        partial(_norm, "MambaRMSNormGated", "mamba2:MambaRMSNormGated@5.22"),
        partial(_norm, "MambaRMSNormGated", "zamba2:Zamba2RMSNormGated", group_size=8),
    ],
    **{
        layer: [partial(_norm, layer, activation=name) for name in ("silu", "sigmoid")]
        for layer in ("RMSNormGated", "RMSNormGatedCastLast")
    },
    "AddLayerNorm": [partial(_seeded, bare_modules.closed_residual, inputs=2)],
    "LayerNorm": [partial(_layer_norm, "deberta:DebertaLayerNorm")],
    "LayerNormFloat32": [partial(_layer_norm, name) for name in ("cohere:CohereLayerNorm", "olmo:OlmoLayerNorm")],
    **{layer: [partial(_mlp, layer, name)] for name, mlps in MLPS.items() for layer in mlps},
    "DropoutMLP": [partial(_mlp, "DropoutMLP", "gelu_new", "t5:T5DenseGatedActDense")],
    # a norm of small values loses digits to its eps, in either forward
    "NormedMLP": [partial(_mlp, "NormedMLP", "silu", scale=4.0)],
    "FastGELU": [partial(_seeded, FastGELUActivation)],
    "NewGELU": [partial(_seeded, NewGELUActivation)],
    "QuickGELU": [partial(_seeded, QuickGELUActivation)],
    "RGLRU": [_recurrent_unit],
    "ForgetGate": [lambda: _random(bare_modules.forget_gate(32, 2, 16), (2, 5, 32), deviation=0.5)],
    **{
        layer: [partial(_hyper_connection, name) for name in names]
        for layer, names in {
            "HyperConnection": ("deepseek_v4:DeepseekV4HyperConnection",),
            "IndependentHyperConnection": ("hy_v4:HYV4HyperConnection",),
            "HyperHead": ("deepseek_v4:DeepseekV4HyperHead", "hy_v4:HYV4HyperHead"),
        }.items()
    },
    "PatchEmbedding": [
        lambda: _random(nn.Conv2d(3, 16, (4, 3), (4, 3)), (2, 3, 9, 7), deviation=0.2),
        lambda: _random(nn.Conv3d(3, 16, 4, 4), (2, 3, 9, 9, 9), deviation=0.2),
    ],
    "MoEExperts": [partial(_experts, cls) for cls in EXPERTS],
    **{layer: [partial(_router, layer)] for layer in ROUTERS.layers},
    **{
        layer: [partial(_without_interface, layer)]
        for layer in ("ClampedExperts", "FlatExperts", "ScaledTokensMoEBlock")
    },
    **{
        layer: [partial(_block, cls) for cls, served_by in moe_blocks_v4.BLOCKS.items() if served_by == layer]
        for layer in ("SparseMoEBlock", "GatedMoEBlock")
    },
}

# layer -> the function of the repository that it calls, and whose arguments it gets
LINEAR = {
    "CausalConv1d": "causal_conv1d_fn",
    "CausalConv1dBeforeScan": "causal_conv1d_fn",
    "CausalConv1dUpdate": "causal_conv1d_update",
    "ChunkGatedDeltaRule": "chunk_gated_delta_rule",
    "ChunkKDA": "chunk_kda",
    "FusedRecurrentGatedDeltaRule": "fused_recurrent_gated_delta_rule",
    "FusedRecurrentKDA": "fused_recurrent_kda",
    "SelectiveScan": "selective_scan_fn",
}
TABLES: tuple[Pattern, ...] = rope_tables.PATTERNS


def _module_results(
    make: Callable[[], Made], layer: type[nn.Module], dtype: torch.dtype, packed: bool = False
) -> tuple[Results, Results]:
    module, arguments = make()
    module, arguments = module.to(dtype), comparing.rounded(arguments, dtype)
    device = copy.deepcopy(module).to("npu")
    if packed:
        layout = sys.modules[layer.__module__.rpartition(".")[0]].packing
        gate, up, _ = layout.projections(device)
        if (reason := layout.pack(gate, up)) is not None:
            raise AssertionError(f"gate and up are not packed: {reason}")
    device.forward = MethodType(layer.forward, device)
    truth = copy.deepcopy(module).double()
    found = comparing.results(device, comparing.moved(arguments), device.parameters())
    return found, comparing.exact(truth, arguments, truth.parameters())


def _rotation_results(reference: Pattern, layer: type[nn.Module], dtype: torch.dtype) -> tuple[Results, Results]:
    """Compare what is rotated, and its gradients; cos and sin have none."""
    inputs = rotary_arguments.arguments(reference.name, dtype, dtype)
    fixed = {name: inputs.pop(name) for name in [*inputs] if name in rotary_arguments.FIXED}

    def called(function: Callable, move: Callable) -> Callable:
        return lambda *rotated: function(**dict(zip(inputs, rotated)), **move(fixed))

    rotated = tuple(inputs.values())
    found = comparing.results(called(layer(), comparing.moved), comparing.moved(rotated))
    return found, comparing.exact(called(original(reference.name), comparing.doubled), rotated)


def _linear_results(reference: Pattern, layer: type[nn.Module], dtype: torch.dtype) -> tuple[Results, Results]:
    case = next(case for case in linear_attention.FUNCTIONS if case.name == LINEAR[reference.layers[0]])
    return case.compute(layer(), partial(case.call, original(reference.name)), dtype)


def _table_results(reference: Pattern, layer: type[nn.Module], dtype: torch.dtype) -> tuple[Results, Results]:
    """Compare with the host: there is no gradient, and the angles are of float32 on both sides, far ones too."""
    by_type = "ByType" in reference.layers[0]
    table = rotary_arguments.embedding(original(reference.name), by_type)
    device = copy.deepcopy(table).to("npu")
    device.forward = MethodType(layer.forward, device)
    arguments = torch.zeros(2, 7, 24, dtype=dtype), _positions(reference)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for kind in [(name,) for name in rotary_arguments.LAYER_TYPES] if by_type else [()]:
        found += device(*comparing.moved(arguments), *kind)
        expected += table(*arguments, *kind)
    return Results(found, []), Results(expected, [])


def _positions(reference: Pattern) -> Tensor:
    """Make positions of the dimensions that a table has, far ones too: rows of them, or two numbers for each patch."""
    layer = reference.layers[0]
    if "OfPatches" in layer:
        return torch.stack((torch.arange(35) // 7, torch.arange(35) % 7), -1)
    rows = torch.stack((torch.arange(7), torch.arange(7) * 19937))
    if not hasattr(original(reference.name), "recomposition_frequencies"):
        return rows
    dimensions = {"RotaryEmbeddingComposedBySections": 4, "RotaryEmbeddingOfRowsByType": 2}.get(layer, 3)
    return torch.stack([rows // (1 + dimension) for dimension in range(dimensions)])


def _cases() -> Iterator[Layer]:
    for layer, makers in MODULES.items():
        for number, make in enumerate(makers):
            title = f"its module {number + 1}" if len(makers) > 1 else ""
            yield Layer(LAYERS[layer], layer, partial(_module_results, make), title)
            if layer in WITH_GATE_AND_UP:
                yield Layer(LAYERS[layer], layer, partial(_module_results, make, packed=True), "gate and up packed")
    for function in FUNCTION_PATTERNS:
        compute = partial(_rotation_results if function.repository == "RoPE" else _linear_results, function)
        yield Layer(function.repository, function.layers[0], compute, function.name)
    for table in TABLES:
        yield Layer("RoPE", table.layers[0], partial(_table_results, table), table.name)


CASES = tuple(_cases())
