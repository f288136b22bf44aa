"""Every layer of the kernels, forward and backward, in every dtype, against what it replaces.

That is the forward as transformers writes it, in float64 on the CPU, of modules with random weights.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation, QuickGELUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kernels_ext_npu.catalogue import LAYERS, NORMS, ROUTERS
from kernels_ext_npu.references import FUNCTION_REFERENCES, REFERENCES, layer_norms, mlp_forms
from kernels_ext_npu.references.gated_recurrence import RecurrentGemmaRglru
from kernels_ext_npu.references.mlps import LlamaMLP, Phi3MLP
from kernels_ext_npu.references.rotary_composed import COMPOSED_ROTARY_EMBEDDINGS
from kernels_ext_npu.references.rotary_embedding import ROTARY_EMBEDDINGS
from tests.support import delta_rule_truth, experts_classes, list_blocks, norm_classes, proofs, rotary_functions


def norm(layer: str) -> tuple[nn.Module, tuple]:
    cls = next(reference.module for reference in REFERENCES if layer in reference.layers)
    module = norm_classes.instance(cls)
    return module, tuple(norm_classes.inputs(module, torch.float32))


def layer_norm(cls: type[nn.Module]) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return cls(32), (torch.randn(2, 5, 32),)


def output() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return layer_norms.BertSelfOutput(32).eval(), (torch.randn(2, 5, 32), torch.randn(2, 5, 32))


def mlp(cls: type[nn.Module], activation: str) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return cls(32, 64, activation).eval(), (torch.randn(2, 5, 32),)  # nothing is dropped


def normed_mlp() -> tuple[nn.Module, tuple]:
    """With inputs of which the norm's eps is no part: a norm of small values loses digits in either forward."""
    module, (x,) = mlp(mlp_forms.BitNetMLP, "silu")
    return module, (4 * x,)


def recurrent_unit() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    module = RecurrentGemmaRglru(2, 16)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module, (torch.randn(2, 40, 16), torch.arange(40).expand(2, -1))


def activation(cls: type[nn.Module]) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return cls(), (torch.randn(6, 32),)


def experts(cls: type[nn.Module]) -> tuple[nn.Module, tuple]:
    module = experts_classes.instance(cls)
    return module, experts_classes.inputs(module)


def router(layer: str) -> tuple[nn.Module, tuple]:
    """With logits that no rounding puts into another order: each token is near to one row of the weight."""
    module = next(reference.module for reference in REFERENCES if layer in reference.layers)(8, 8, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.eye(8) if parameter.shape == (8, 8) else torch.zeros(parameter.shape))
    tokens = torch.stack([torch.arange(8).roll(i) / 4 for i in range(12)])
    given = list(inspect.signature(module.forward).parameters)[1:]
    return module, (
        tokens.view(3, 4, 8) if layer == "SigmoidTopKRouterLinear" else tokens,
        *[torch.zeros(8)] * len(given),
    )


def without_interface(layer: str) -> tuple[nn.Module, tuple]:
    module, (tokens,) = (
        next(r.module for r in REFERENCES if layer in r.layers)(8, 8, 32),
        router("SoftmaxTopKRouter")[1],
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.eye(8) if "router" in name else torch.randn(parameter.shape) / 3)
    if layer == "ScaledTokensMoEBlock":
        return module, (tokens,)
    return module, (tokens, torch.rand(12, 8).topk(2, -1).indices, torch.rand(12, 2))


def block(cls: type[nn.Module]) -> tuple[nn.Module, tuple]:
    return list_blocks.block(cls), (list_blocks.inputs(),)


# layer -> modules that it serves, each with arguments
MODULES: dict[str, list[Callable[[], tuple[nn.Module, tuple]]]] = {
    **{layer: [partial(norm, layer)] for layer in NORMS.layers},
    "AddLayerNorm": [output],
    "LayerNorm": [partial(layer_norm, layer_norms.DebertaLayerNorm)],
    "LayerNormFloat32": [
        partial(layer_norm, layer_norms.CohereLayerNorm),
        partial(layer_norm, layer_norms.OlmoLayerNorm),
    ],
    "SwiGLUMLP": [partial(mlp, LlamaMLP, "silu")],
    "GeGLUMLP": [partial(mlp, LlamaMLP, "gelu_pytorch_tanh")],
    "FusedSwiGLUMLP": [partial(mlp, Phi3MLP, "silu")],
    "FusedGeGLUMLP": [partial(mlp, Phi3MLP, "gelu_pytorch_tanh")],
    "ExactGeGLUMLP": [partial(mlp, LlamaMLP, "gelu")],
    "FusedExactGeGLUMLP": [partial(mlp, Phi3MLP, "gelu")],
    "ClampedSwiGLUMLP": [partial(mlp, mlp_forms.DeepseekV4MLP, "silu")],
    "ScaledSwiGLUMLP": [partial(mlp, mlp_forms.FalconH1MLP, "silu")],
    "DropoutMLP": [partial(mlp, mlp_forms.T5DenseGatedActDense, "gelu_new")],
    "FusedDropoutMLP": [partial(mlp, mlp_forms.ModernBertMLP, "gelu")],
    "DroppedMLP": [partial(mlp, mlp_forms.SeedOssMLP, "silu")],
    "GloballyScaledMLP": [partial(mlp, mlp_forms.InklingMLP, "silu")],
    "NormedMLP": [normed_mlp],
    "FusedMLPByLayer": [partial(mlp, mlp_forms.MoshiGatingMLP, "silu")],
    "FusedAdaptedMLP": [partial(mlp, mlp_forms.Zamba2MLP, "gelu")],
    "FastGELU": [partial(activation, FastGELUActivation)],
    "NewGELU": [partial(activation, NewGELUActivation)],
    "QuickGELU": [partial(activation, QuickGELUActivation)],
    "RGLRU": [recurrent_unit],
    "MoEExperts": [partial(experts, Qwen3MoeExperts), partial(experts, GptOssExperts)],
    **{layer: [partial(router, layer)] for layer in ROUTERS.layers},
    **{
        layer: [partial(without_interface, layer)]
        for layer in ("ClampedExperts", "FlatExperts", "ScaledTokensMoEBlock")
    },
    **{
        layer: [partial(block, cls) for cls, name in list_blocks.BLOCKS.items() if name == layer]
        for layer in ("SparseMoEBlock", "GatedMoEBlock")
    },
}


ROTATIONS = [reference for reference in FUNCTION_REFERENCES if reference.repository == "RoPE"]
OTHERS = [reference for reference in FUNCTION_REFERENCES if reference.repository != "RoPE"]
# layer -> arguments
LINEAR: dict[str, Callable[[], list[torch.Tensor]]] = {
    "CausalConv1d": lambda: [torch.randn(2, 8, 9), torch.randn(8, 4), torch.randn(8)],
    "CausalConv1dBeforeScan": lambda: [torch.randn(2, 8, 9), torch.randn(8, 4), torch.randn(8)],
    "CausalConv1dUpdate": lambda: [torch.randn(2, 8, 1), torch.randn(2, 8, 4), torch.randn(8, 4), torch.randn(8)],
    "ChunkGatedDeltaRule": partial(delta_rule_truth.draw, 0, (1, 70, 2, 2, 8, 8), False),
    "ChunkKDA": partial(delta_rule_truth.draw, 0, (1, 70, 2, 2, 8, 8), True),
    "FusedRecurrentGatedDeltaRule": partial(delta_rule_truth.draw, 0, (3, 1, 2, 2, 8, 8), False),
    "FusedRecurrentKDA": partial(delta_rule_truth.draw, 0, (3, 1, 2, 2, 8, 8), True),
    "SelectiveScan": lambda: [
        *(torch.randn(2, 8, 40), torch.randn(2, 8, 40).sigmoid(), -torch.rand(8, 4)),
        *(torch.randn(2, 4, 40), torch.randn(2, 4, 40)),
    ],
}


def called(function: Callable, layer: str, *tensors: torch.Tensor) -> object:
    """Call a function of linear attention as models do."""
    if layer == "CausalConv1dUpdate":  # which writes to the state
        return function(tensors[0], tensors[1].clone(), *tensors[2:], "silu")
    if layer in ("CausalConv1d", "CausalConv1dBeforeScan"):
        return function(*tensors, "silu")
    if layer == "SelectiveScan":
        return function(*tensors, return_last_state=True)
    return function(*tensors, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)


def test_the_lists_are_complete(kernels: dict[str, ModuleType]) -> None:
    functions = {reference.layer for reference in FUNCTION_REFERENCES}
    tables = {layer for reference in (*ROTARY_EMBEDDINGS, *COMPOSED_ROTARY_EMBEDDINGS) for layer in reference.layers}
    assert set(MODULES) | functions | tables == set(LAYERS)
    for layer, repository in LAYERS.items():
        assert issubclass(getattr(kernels[repository].layers, layer), nn.Module)


@pytest.mark.parametrize("dtype", proofs.DTYPES, ids=str)
@pytest.mark.parametrize("layer", MODULES)
def test_a_layer_is_what_float64_gives(kernels, largest, layer: str, dtype: torch.dtype) -> None:
    for make in MODULES[layer]:
        module, arguments = make()
        original = module.to(dtype)
        arguments = tuple(t.to(dtype) if t.is_floating_point() else t for t in arguments)
        device = copy.deepcopy(original).to("npu")
        device.forward = MethodType(getattr(kernels[LAYERS[layer]].layers, layer).forward, device)
        truth = copy.deepcopy(original).double()
        found = proofs.results(device, proofs.moved(arguments), device.parameters())
        with proofs.wide():
            exact = proofs.results(truth, proofs.doubled(arguments), truth.parameters())
        difference = proofs.distance(found, exact)
        largest("layers", dtype, difference)
        assert difference <= proofs.TOLERANCE[dtype], type(module).__name__


@pytest.mark.parametrize("dtype", proofs.DTYPES, ids=str)
@pytest.mark.parametrize("reference", ROTATIONS, ids=lambda reference: reference.function.__name__)
def test_a_rotation_is_what_float64_gives(kernels, largest, reference, dtype: torch.dtype) -> None:
    inputs = rotary_functions.arguments(reference.function.__name__, dtype, dtype)
    layer = getattr(kernels["RoPE"].layers, reference.layer)()
    found = rotary_functions.results(layer, proofs.moved(inputs))
    difference = proofs.distance(found, rotary_functions.exact(reference.function, inputs))
    largest("layers", dtype, difference)
    assert difference <= proofs.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", proofs.DTYPES, ids=str)
@pytest.mark.parametrize("reference", OTHERS, ids=lambda reference: reference.function.__name__)
def test_a_function_of_linear_attention_is_what_float64_gives(kernels, largest, reference, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [t.to(dtype) for t in LINEAR[reference.layer]()]
    layer = getattr(kernels[reference.repository].layers, reference.layer)()
    found = proofs.results(partial(called, layer, reference.layer), proofs.moved(tuple(inputs)))
    with proofs.wide():
        exact = proofs.results(partial(called, reference.function, reference.layer), proofs.doubled(tuple(inputs)))
    difference = proofs.distance(found, exact)
    largest("layers", dtype, difference)
    assert difference <= proofs.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", proofs.DTYPES, ids=str)
@pytest.mark.parametrize("reference", ROTARY_EMBEDDINGS, ids=lambda reference: reference.module.__name__)
def test_rotary_tables_are_those_of_the_cpu(kernels, largest, reference, dtype: torch.dtype) -> None:
    """They have no gradient; the angles are of float32 on both sides, far ones too."""
    layer = getattr(kernels["RoPE"].layers, reference.layers[0])
    original = rotary_functions.embedding(reference.module, "ByType" in reference.layers[0])
    device = copy.deepcopy(original).to("npu")
    device.forward = MethodType(layer.forward, device)
    arguments = torch.zeros(2, 7, 24, dtype=dtype), torch.stack((torch.arange(7), torch.arange(7) * 19937))
    for kind in rotary_functions.LAYER_TYPES if "ByType" in reference.layers[0] else (None,):
        more = () if kind is None else (kind,)
        expected = original(*arguments, *more)
        difference = proofs.distance(list(device(*proofs.moved(arguments), *more)), list(expected))
        largest("layers", dtype, difference)
        assert difference <= proofs.TOLERANCE[dtype]
