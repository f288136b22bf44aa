"""Forwards of a kernelized model, each beside LLaMA-Factory's and transformers' own for the same module."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

import kernels_ext_npu
from tests.support import llama_factory
from tests.support.sizes import sizes

T, H = 16, 32
# so small that a kernel is over soon
SIZES = sizes(H, 64, heads=2, keys=2, width=128, layers=1, words=32)
MOE_SIZES = SIZES | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
Forward = Callable[..., object]
Call = Callable[[], object]


class Compared(NamedTuple):
    """What three sides make of one module or function: ours, LLaMA-Factory's and transformers' own.

    The first arguments, as many as are ``trained``, take gradients in training, and so do parameters of the module.
    """

    ours: Forward
    theirs: Forward
    original: Forward
    arguments: tuple[Tensor, ...]
    trained: int
    module: nn.Module | None = None

    def steps(self, training: bool) -> tuple[list[Call], Call]:
        """What can be counted or timed: a forward, or in training that and a backward.

        Returns a step of each side, in their order, and what comes before each step: gradients are gone.
        """
        arguments = [a.detach().requires_grad_(training and i < self.trained) for i, a in enumerate(self.arguments)]
        parameters = [] if self.module is None else list(self.module.train(training).parameters())

        def prepare() -> None:
            for tensor in (*arguments, *parameters):
                tensor.grad = None

        forwards = (self.ours, self.theirs, self.original)
        if not training:
            return [partial(forward, *arguments) for forward in forwards], prepare
        return [_training_step(forward, arguments) for forward in forwards], prepare


def compared(dtype: torch.dtype) -> dict[str, Compared]:
    """The forwards that a kernelized model has, by name; needs a registration."""
    draw = partial(torch.randn, device="npu", dtype=dtype)
    dense, norms = Qwen3ForCausalLM(Qwen3Config(**SIZES)), _Norms()
    mixture, plain = (Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE_SIZES)).to("npu", dtype) for _ in range(2))
    plain.set_experts_implementation("grouped_mm")  # transformers' default without a registration
    for model in (dense, mixture, norms):
        kernels_ext_npu.kernelize(model.to("npu", dtype))
    rotate = modeling_qwen3.apply_rotary_pos_emb
    layer = dense.model.layers[0]
    norm, mlp, experts = layer.input_layernorm, layer.mlp, mixture.model.layers[0].mlp.experts
    x, tokens = draw(1, T, H), draw(T, H)
    q, k = (draw(1, T, 2, 128).transpose(1, 2) for _ in range(2))  # as projections give them
    cos, sin = draw(1, T, 128), draw(1, T, 128)
    index, weights = torch.arange(2 * T, device="npu").view(T, 2) % 4, draw(T, 2)

    def beside(module: nn.Module, theirs: Forward, *arguments: Tensor) -> Compared:
        original = MethodType(type(module).forward, module)
        return Compared(module.forward, MethodType(theirs, module), original, arguments, len(arguments), module)

    return {
        "RMSNorm": beside(norm, llama_factory.rms_norm, x),
        "RMSNorm, zero-centred": beside(norms.zero_centred, llama_factory.zero_centred_rms_norm, x),
        "RMSNorm, gated": beside(norms.gated, llama_factory.gated_rms_norm, x, draw(1, T, H)),
        "SwiGLU MLP": beside(mlp, llama_factory.swiglu_mlp, x),
        "RoPE": Compared(
            rotate.forward, llama_factory.rotary, MethodType(type(rotate).forward, rotate), (q, k, cos, sin), trained=2
        ),
        "FusedMoE experts": Compared(
            experts.forward,
            MethodType(llama_factory.experts, experts),
            plain.model.layers[0].mlp.experts.forward,
            (tokens, index, weights),
            trained=1,
            module=experts,
        ),
    }


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.zero_centred, self.gated = Qwen3NextRMSNorm(H), Qwen3NextRMSNormGated(H)


def _training_step(forward: Forward, arguments: list[Tensor]) -> Call:
    def results() -> tuple[Tensor, ...]:
        found = forward(*arguments)
        return found if isinstance(found, tuple) else (found,)

    gradients = [torch.ones_like(result) for result in results()]
    return lambda: torch.autograd.backward(results(), gradients)
