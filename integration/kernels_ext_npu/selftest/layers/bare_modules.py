"""Makes modules of transformers' classes that have what their forwards read, without configs of whole models.

Only what a class names is made: whatever else a layer looked at would be missing, as it is in a class of somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from kernels_ext_npu.matching.known_forwards import is_installed, known_original
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.patterns.collection import PATTERNS
from kernels_ext_npu.selftest.layers.other_releases import ORIGINALS
from kernels_ext_npu.syntax.source_tree import code_names
from kernels_ext_npu.transformers_internals import original_function, undecorated

Makers = Mapping[str, Callable[[], Any]]


def example(layer: str) -> Any:
    """Return a class that a layer serves: of the installed transformers, if it has one.

    Raises:
        LookupError: neither it nor another release is known to have one.
    """
    names = [pattern.name for pattern in PATTERNS if layer in pattern.layers]
    return original(next(filter(is_installed, names), names[-1]))


def original(name: str) -> Any:
    """Return the class or function with a name of known_forwards.json: that of the installed transformers, if any.

    Raises:
        LookupError: it has none, or another one, and no other release is known to have this one.
    """
    found = ORIGINALS[name] if name in ORIGINALS and not is_installed(name) else known_original(name)
    return found if isinstance(found, type) else original_function(found)


def bare(cls: type[nn.Module], makers: Makers, **members: Any) -> Any:
    """Make a module of a class with those of some members that its methods name.

    Args:
        cls: the class.
        makers: for names, or several between blanks, what makes the member.
        members: further ones, which it gets whether it names them or not.
    """
    module: Any = cls.__new__(cls)
    nn.Module.__init__(module)
    own = [vars(base) for base in cls.__mro__ if base not in (nn.Module, object)]
    functions = [value for members in own for name, value in members.items() if name not in ("__init__", "extra_repr")]
    read = frozenset().union(*(code_names(undecorated(f)[0].__code__) for f in functions if hasattr(f, "__code__")))
    for names, make in makers.items():
        for name in read.intersection(names.split()):
            setattr(module, name, make())
    for name, value in members.items():
        setattr(module, name, value)
    return module


def norm(cls: type[nn.Module], size: int = 32, **members: Any) -> Any:
    """Make a norm of the last dimension, with a weight of ones."""
    makers: Makers = {
        "weight": lambda: nn.Parameter(torch.ones(size)),
        "eps variance_epsilon": lambda: 1e-6,
        "activation": lambda: "silu",
        "with_scale force_float32_reductions": lambda: True,
        "dim_norm": lambda: size,
        "normalized_shape": lambda: (size,),
        "bias": lambda: nn.Parameter(torch.zeros(size)) if "LayerNorm" in _layer(cls) else None,
        "group_size": lambda: None,
    }
    return bare(cls, makers, **members)


def closed_residual(size: int = 32, p: float = 0.1) -> Any:
    """Make what closes a residual in BERT: a projection, a dropout, and the norm of the sum."""
    makers: Makers = {
        "dense": lambda: nn.Linear(size, size),
        "dropout": lambda: nn.Dropout(p),
        "LayerNorm": lambda: nn.LayerNorm(size, eps=1e-12),
    }
    return bare(example("AddLayerNorm"), makers)


def mlp(cls: type[nn.Module], hidden_size: int, size: int, act: str = "silu") -> Any:
    """Make a gated MLP, whatever its projections are called."""
    makers: Makers = {
        "gate_proj up_proj w1 w3 wi_0 wi_1": lambda: nn.Linear(hidden_size, size, bias=False),
        "gate_up_proj input_linear Wi fc1": lambda: nn.Linear(hidden_size, 2 * size, bias=False),
        "down_proj output_linear w2 wo Wo fc2": lambda: nn.Linear(size, hidden_size, bias=False),
        "act_fn activation_fn activation act": lambda: ACT2FN[act],
        "dropout drop": lambda: nn.Dropout(0.1),
        "residual_dropout": lambda: 0.1,
        "ffn_sub_norm": lambda: nn.RMSNorm(size),
        "global_scale": lambda: nn.Parameter(torch.ones(1)),
        "limit swiglu_limit": lambda: 1.0,
        "gate_multiplier": lambda: 0.875,
        "down_multiplier": lambda: 0.625,
        "activation_sparsity": lambda: 0.0,
        "gate_up_proj_adapter_list": lambda: nn.ModuleList([nn.Linear(hidden_size, 2 * size, bias=False)]),
        "layer_dic": lambda: {None: 0},
    }
    return bare(cls, makers)


def router(cls: type[nn.Module], hidden_size: int, experts: int, top_k: int) -> Any:
    """Make a router that chooses experts, with one group of them, no correction, and a weight of zeros."""
    makers: Makers = {
        "hidden_dim": lambda: hidden_size,
        "num_experts n_routed_experts": lambda: experts,
        "weight": lambda: nn.Parameter(torch.zeros(experts, hidden_size)),
        "gate wg classifier": lambda: nn.Linear(hidden_size, experts, bias=False),
        "norm_topk_prob": lambda: True,
        "routed_scaling_factor router_scaling_factor route_scale output_multiplier": lambda: 1.0,
        "num_group topk_group": lambda: None if "Ungrouped" in _layer(cls) else 1,
        "topk_method": lambda: "group_limited_greedy",
        "expert_selection_fn": lambda: "softmax",
        "norm_min norm_topk_prob_eps": lambda: 1e-12,
        "router_logit_softcapping": lambda: 0.0,
        "scoring_function score_fn": lambda: ACT2FN["sigmoid"],
        "moe_statics": lambda: bare(
            known_original("ernie4_5_moe:Ernie4_5_MoeStatics"),
            {"e_score_correction_bias": lambda: nn.Parameter(torch.zeros(1, experts), requires_grad=False)},
        ),
    }
    if issubclass(cls, nn.Linear):  # Llama 4's
        module: Any = cls.__new__(cls)
        nn.Linear.__init__(module, hidden_size, experts, bias=False)
        module.top_k = top_k
        return module
    made = bare(cls, makers, top_k=top_k)
    if any(isinstance(child, nn.Linear) for child in made._modules.values()):
        made._parameters.pop("weight", None)  # which is named as that of the linear layer
    made.register_buffer("e_score_correction_bias", torch.zeros(experts))
    return made


def forget_gate(hidden_size: int, heads: int, head_dim: int) -> Any:
    """Make Kimi's forget gate, which has a decay for each channel of a key."""
    makers: Makers = {
        "f_a_proj": lambda: nn.Linear(hidden_size, head_dim, bias=False),
        "f_b_proj": lambda: nn.Linear(head_dim, heads * head_dim, bias=False),
        "dt_bias": lambda: nn.Parameter(torch.zeros(heads * head_dim)),
        "A_log": lambda: nn.Parameter(torch.zeros(1, 1, heads, 1)),
    }
    return bare(example("ForgetGate"), makers, head_dim=head_dim, num_heads=heads)


def recurrent_unit(heads: int, width: int) -> Any:
    """Make Griffin's real-gated linear recurrent unit, without a state."""
    size = width // heads
    makers: Makers = {
        "recurrent_param": lambda: nn.Parameter(torch.zeros(width)),
        "input_gate_weight recurrent_gate_weight": lambda: nn.Parameter(torch.zeros(heads, size, size)),
        "input_gate_bias recurrent_gate_bias": lambda: nn.Parameter(torch.zeros(heads, size)),
        "num_attention_heads": lambda: heads,
        "block_width": lambda: size,
    }
    return bare(example("RGLRU"), makers, recurrent_states=None)


def hyper_connection(name: str, hidden_size: int, streams: int = 4) -> Any:
    """Make what reads or writes residual streams, by the name of its class, with the norm that this class has."""
    cls, width = known_original(name), streams * hidden_size
    is_independent = name.startswith("hy_v4")
    count = 1 if "Head" in name else 2 if is_independent else 2 + streams
    scales = 1 if "Head" in name else 2 if is_independent else 3
    normed = "hy_v4:HYV4UnweightedRMSNorm" if is_independent else "deepseek_v4:DeepseekV4UnweightedRMSNorm"
    makers: Makers = {
        "fn hc_fn": lambda: nn.Parameter(torch.zeros(count * streams, width)),
        "base hc_base": lambda: nn.Parameter(torch.zeros(count * streams)),
        "scale hc_scale": lambda: nn.Parameter(torch.ones(scales)),
        "hc_mult": lambda: streams,
        "hc_sinkhorn_iters": lambda: 20,
        "hc_post_magnitude": lambda: 2.0,
        "eps hc_eps": lambda: 1e-6,
    }
    return bare(cls, makers, input_norm=norm(known_original(normed)))


def experts(layer: str, hidden_size: int, number: int, size: int) -> Any:
    """Make the experts of a class that calls no implementation by name, with weights of zeros."""

    def weights(*shape: int) -> Callable[[], nn.Parameter]:
        return lambda: nn.Parameter(torch.zeros(shape))

    made: Makers = {
        "hidden_size hidden_dim": lambda: hidden_size,
        "num_experts": lambda: number,
        "ffn_hidden_size": lambda: size,
        "act_fn activation_fn": lambda: ACT2FN["silu"],
        "limit": lambda: 7.0,
    }
    stacked = {"gate_up_proj": weights(number, 2 * size, hidden_size), "down_proj": weights(number, hidden_size, size)}
    if layer == "ClampedExperts":
        return bare(example(layer), {**made, **stacked})
    if layer == "FlatExperts":
        flat = {name: weights(number * size, hidden_size)() for name in ("w1", "v1", "w2")}
        return bare(example(layer), made, mlp=bare(known_original("dbrx:DbrxExpertGLU"), made, **flat))
    scaled = {"gate_up_proj": weights(number, hidden_size, 2 * size), "down_proj": weights(number, size, hidden_size)}
    return bare(
        example(layer),
        made,
        experts=bare(known_original("llama4:Llama4TextExperts"), {**made, **scaled}),
        router=router(known_original("llama4:Llama4Router"), hidden_size, number, 1),
        shared_expert=mlp(known_original("llama:LlamaMLP"), hidden_size, size),
    )


def _layer(cls: type[nn.Module]) -> str:
    pattern = find_pattern(cls)
    return pattern.layers[0] if pattern is not None else ""
