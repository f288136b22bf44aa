"""Bind the kernel to small blocks with a list of experts, and compute their results."""

import copy
from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn

from kernels_ext_npu.selftest.layers.moe_blocks_v4 import BLOCKS, DeepseekV3MoE
from tests.support import swapped

each_block = pytest.mark.parametrize("cls", BLOCKS, ids=lambda cls: cls.__name__)
packed_or_not = pytest.mark.parametrize("packed", [True, False])


def bound(kernel: ModuleType, original: nn.Module, packed: bool = True) -> nn.Module:
    module = copy.deepcopy(original).to("npu")
    if packed:
        for expert in module.experts:
            pack(*((expert.w1, expert.w3) if hasattr(expert, "w1") else (expert.gate_proj, expert.up_proj)))
    module.forward = MethodType(getattr(kernel.layers, BLOCKS[type(original)]).forward, module)
    return module


def pack(gate: nn.Linear, up: nn.Linear) -> None:
    """Lay gate and up side by side in one storage, as SwiGLU's kernel leaves them."""
    for name in ("weight", "bias"):
        pair = [getattr(gate, name), getattr(up, name)]
        if pair[0] is not None:
            for parameter, half in zip(pair, torch.cat(pair).detach().chunk(2)):
                parameter.data = half


def results(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the result, router logits where there are any, and the gradients of tokens and parameters."""
    return swapped.results(module, x, call=lambda leaf: module(leaf * 1))  # Mixtral's noise changes it in place


def assert_close(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Allow 1e-6 of the norm: three products in float32, each with sums in another order. And 4e-6, for what cancels.

    An expert without tokens has gradients of zeros, and in the references none.
    """
    for a, b in zip(found, expected):
        if a is None or b is None:
            rest = b if a is None else a
            assert rest is None or not rest.any()
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a.cpu() - b).norm() <= 1e-6 * b.norm() + 4e-6


def error(found: list[Tensor | None], truth: list[Tensor | None]) -> float:
    """Measure the distance for the experts that got tokens: torch leaves the gradients of the others out."""
    pairs = [(a, c) for a, c in zip(found, truth) if c is not None and c.norm() > 0]
    return torch.stack([(a.cpu().double() - c).norm() / c.norm() for a, c in pairs]).norm().item()


def double(original: nn.Module) -> nn.Module:
    """Copy a block in float64; the gates that compute in float32 go on to do so."""
    module = copy.deepcopy(original).double()
    if isinstance(module, DeepseekV3MoE):
        module.gate.register_forward_hook(lambda gate, arguments, routed: (routed[0], routed[1].double()))
    return module


def decided(original: nn.Module, x: Tensor, tokens: int = 24) -> Tensor:
    """Choose tokens for which rounding does not choose other experts."""
    alike = (_chosen(original, x) == _chosen(double(original), x.double())).all(-1)
    assert alike.sum() >= tokens
    return x[:, alike][:, :tokens]


def _chosen(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, DeepseekV3MoE):
        return module.gate(x)[0].sort(-1)[0]
    return module.gate(x[0]).topk(module.top_k)[1].sort(-1)[0]
