"""The modules that Liger-Kernel 0.7.0 times beside its own: transformers' and torch's, with the inputs it gives them.

Read in benchmark/scripts of https://github.com/linkedin/Liger-Kernel/tree/v0.7.0; the forwards are written anew, with
the operators in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP


@dataclass
class Module:
    """A module as it is timed, run after run.

    Attributes:
        forward: computes the outputs.
        inputs: tensors with gradients.
        gradients: of the outputs; empty for a loss, and None where each run makes them.
        keeps: whether a run of forward and backward keeps the graph, as one of the backward alone does.
        drops: whether gradients of inputs are dropped before forward and backward, too; those of parameters add up.
        returns: whether gradients are returned, and none is added up.
        held: other tensors that live meanwhile.
    """

    forward: Callable[[], Any]
    inputs: list[Tensor]
    gradients: list[Tensor] | None
    keeps: bool = True
    drops: bool = True
    returns: bool = False
    held: list[Any] = field(default_factory=list)

    def outputs(self) -> list[Tensor]:
        """Run the forward."""
        given = self.forward()
        return list(given) if isinstance(given, tuple) else [given]

    def make_gradients(self, outputs: list[Tensor]) -> list[Tensor] | None:
        """Return the gradients of outputs; None of a loss."""
        made = [torch.empty_like(each) for each in outputs] if self.gradients is None else self.gradients
        return made or None

    def backward(self, outputs: list[Tensor], gradients: list[Tensor] | None, keeps: bool = True) -> None:
        """Run the backward of some outputs."""
        if self.returns:
            torch.autograd.grad(outputs, self.inputs, gradients, retain_graph=keeps)
        else:
            torch.autograd.backward(outputs, gradients, retain_graph=keeps)

    def run(self) -> None:
        """Run forward and backward."""
        outputs = self.outputs()
        self.backward(outputs, self.make_gradients(outputs), self.keeps)

    def drop(self) -> None:
        """Drop the gradients of inputs."""
        for tensor in self.inputs:
            if tensor.is_leaf:
                tensor.grad = None


def make(name: str, x: int, config: dict[str, Any]) -> Module:
    """Make a module on the NPU from a row of the benchmark: its name, the value that varies, and the others."""
    with torch.device("npu"):
        return _MAKE[name](x, config | {"dtype": getattr(torch, str(config.get("dtype", "")).rpartition(".")[2], None)})


def _softmax(width: int, config: dict[str, Any]) -> Module:
    return _on_rows(nn.Softmax(dim=-1), (config["M"], width), config["dtype"])


def _rms_norm(width: int, config: dict[str, Any]) -> Module:
    weight, other = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
    module = _on_rows(partial(_norm, weight=weight), (config["M"], width), config["dtype"])
    module.held.append(other)
    return module


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-6)
    return weight * wide.to(x.dtype)


def _add_rms_norm(width: int, config: dict[str, Any]) -> Module:
    x, residual, *gradients = (torch.empty(config["M"], width, dtype=config["dtype"]) for _ in range(4))
    weights = [nn.Parameter(torch.ones(width)) for _ in range(4)]
    x.requires_grad_()
    residual.requires_grad_()

    def forward() -> tuple[Tensor, Tensor]:
        total = x.to(torch.float32) + residual.to(torch.float32)
        return _norm(total, weights[0]), total.to(x.dtype)

    return Module(forward, [x, residual], gradients, keeps=False, held=weights)


def _layer_norm(width: int, config: dict[str, Any]) -> Module:
    module = _on_rows(nn.LayerNorm(width), (config["M"], width), config["dtype"])
    module.held.append(nn.LayerNorm(width))
    return module


def _group_norm(channels: int, config: dict[str, Any]) -> Module:
    norm = nn.GroupNorm(channels // config["channels_per_group"], channels)
    module = _on_rows(norm, (config["M"], channels, config["H"]), config["dtype"])
    module.held.append(nn.LayerNorm(channels))
    return module


def _poly_norm(width: int, config: dict[str, Any]) -> Module:
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        cube, square, same = wide**3, wide**2, wide**1
        third, second, first = norm(cube), norm(square), norm(same)
        return (weight[0] * third + weight[1] * second + weight[2] * first + bias).to(x.dtype)

    return _on_rows(forward, (config["M"], width), config["dtype"])


def _cross_entropy(words: int, config: dict[str, Any]) -> Module:
    logits = torch.empty(config["B"] * config["T"], words, requires_grad=True)
    labels = torch.empty(config["B"] * config["T"], dtype=torch.long)
    return Module(lambda: functional.cross_entropy(logits, labels), [logits], [], keeps=False, drops=False)


def _tvd(words: int, config: dict[str, Any]) -> Module:
    leaf = torch.empty(config["B"] * config["T"], words, requires_grad=True)
    p = leaf.softmax(dim=-1)
    q = torch.empty_like(p)
    return Module(lambda: torch.sum(torch.abs(p - q) / 2.0) / len(p), [p], [], drops=False, held=[leaf])


def _mlp(tokens: int, config: dict[str, Any]) -> Module:
    names = ("hidden_size", "intermediate_size", "hidden_act")
    before = torch.get_default_dtype()
    torch.set_default_dtype(config["dtype"])
    layer = LlamaMLP(LlamaConfig(**{name: config[name] for name in names}))
    torch.set_default_dtype(before)
    rows = config["B"] if "B" in config else config["bsz"]
    module = _on_rows(layer, (rows, tokens, config["hidden_size"]), config["dtype"])
    module.gradients = None
    return module


def _mrope(value: int, config: dict[str, Any]) -> Module:
    width, tokens = config.get("hidden_size", value), config.get("seq_len", value)
    heads, key_heads = config["num_q_heads"], config["num_kv_heads"]
    size = width // heads
    q, k = (torch.empty(1, tokens, number, size, dtype=config["dtype"]) for number in (heads, key_heads))
    q, k = (tensor.requires_grad_().transpose(1, 2) for tensor in (q, k))
    gradients = [torch.empty_like(tensor) for tensor in (q, k)]
    cos, sin = (torch.empty(3, 1, tokens, size, dtype=config["dtype"]) for _ in range(2))
    part = size * 3 // 16
    sections = 2 * [size // 2 - 2 * part, part, part]

    def half(x: Tensor) -> Tensor:
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((-second, first), dim=-1)

    def forward() -> tuple[Tensor, ...]:
        tables = [
            torch.cat([piece[i % 3] for i, piece in enumerate(table.split(sections, dim=-1))], dim=-1).unsqueeze(1)
            for table in (cos, sin)
        ]
        return tuple((x * tables[0]) + (half(x) * tables[1]) for x in (q, k))

    return Module(forward, [q, k], gradients, keeps=False, returns=True)


def _on_rows(forward: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Module:
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    return Module(lambda: forward(x), [x], [torch.empty(shape, dtype=dtype)], held=[forward])


_MAKE: dict[str, Callable[[int, dict[str, Any]], Module]] = {
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "poly_norm": _poly_norm,
    "cross_entropy": _cross_entropy,
    "tvd": _tvd,
    "swiglu": _mlp,
    "geglu": _mlp,
    "tiled_swiglu": _mlp,
    "tiled_geglu": _mlp,
    "qwen2vl_mrope": _mrope,
}
