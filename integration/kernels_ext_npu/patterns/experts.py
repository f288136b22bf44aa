"""The experts of transformers whose weights are one tensor for each projection.

transformers' ``use_experts_implementation`` gives most such classes one forward, which calls an implementation by the
name in the model's config. What a class computes is said by the flags that the decorator sets on its instances, and by
its ``_apply_gate``; the decorator itself is the pattern (matching/fingerprint.py). Others have no such interface, and
Llama 4's are served as a block with their router, since they see every token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Part, Pattern


def _refuse_called_by_name(module: Any) -> str | None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = static_getattr(module, name)
        if weight is not COMPUTED and type(weight) not in (nn.Parameter, torch.Tensor, FakeTensor, DTensor):
            return f"its {name} is a {type(weight).__name__}"
    return None


def _refuse_weights(experts: Any, names: Sequence[str] = ("gate_up_proj", "down_proj")) -> str | None:
    others = [name for name in names if type(experts._parameters.get(name)) not in (nn.Parameter, FakeTensor)]
    return f"its {others[0]} is no plain weight" if others else None


_MLP = Part("mlp", ("dbrx:DbrxExpertGLU",), "its mlp is a {}")
_EXPERTS = Part("experts", ("llama4:Llama4TextExperts",), "its experts are {}")
_ROUTER = Part("router", ("llama4:Llama4Router",), "its router is a {}", is_called=True)

PATTERNS = (
    Pattern("qwen3_moe:Qwen3MoeExperts", ("MoEExperts",), _refuse_called_by_name),
    Pattern("step3p7:Step3p7Experts", ("ClampedExperts",), _refuse_weights),
    Pattern("dbrx:DbrxExperts", ("FlatExperts",), lambda m: _refuse_weights(m.mlp, ("w1", "v1", "w2")), parts=(_MLP,)),
    Pattern(
        "llama4:Llama4TextMoe",
        ("ScaledTokensMoEBlock",),
        lambda m: _refuse_weights(m.experts),
        parts=(_EXPERTS, _ROUTER),
    ),
)
