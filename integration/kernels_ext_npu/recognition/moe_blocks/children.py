"""The children of a block with a list of experts: the experts, what chooses among them, and what stands for either."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.lookup import find_pattern, why_not_served
from kernels_ext_npu.patterns.mlps import ACTIVATED_BY, GATED, projection_names
from kernels_ext_npu.recognition.computed import Computed, NotRecognised, Recognised
from kernels_ext_npu.recognition.module_settings import Settings, is_linear, read_settings
from kernels_ext_npu.recognition.moe_blocks.formulas import Experts
from kernels_ext_npu.recognition.stand_ins import filled
from kernels_ext_npu.recognition.watched_runs import Watched, attempt, casts

_LOOKED_AT_BY_THE_LAYER = (
    "llama:LlamaMLP",
    "mixtral:MixtralBlockSparseTop2MLP",
)  # which finds projections and activation itself
_LARGEST = 2**22  # numbers in the weights of what is tried, unless they are as many as of a few gates
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Gate(NamedTuple):
    """A child that may say which experts a token goes to."""

    name: str  # of the child
    settings: Settings | None  # what it reads; None of a linear layer
    returned: dict[tuple[bool, torch.dtype], Any]  # what it returned of 6 tokens, by rows, for each mode and dtype
    keeps_sequences: bool = True  # whether it returned that in the shape that it got the tokens in
    index_at: int | None = None  # where in that the experts are; None where it returns logits
    weights_at: int | None = None  # where the weights are
    top_k: int = 0  # how many experts there are for a token


def read_experts(
    module: nn.Module, recognise: Callable[[nn.Module], Recognised | NotRecognised | None]
) -> Experts | None:
    """Return the experts of a block: a list of gated MLPs, which is longer than any other that it has."""
    name, listed = longest_list(module) or ("", nn.ModuleList())
    if len(listed) < 2 or len({type(each) for each in listed}) != 1:
        return None
    first: Any = listed[0]
    settings: Settings | None
    known = partial(Experts, name, len(listed))
    pattern = find_pattern(type(first))
    if pattern is None:
        what = recognise(first)
        if not isinstance(what, Recognised):
            return None
        layer, settings, roles = what.computed.layer, what.settings, dict(what.computed.projections)
        names: Any = tuple(map(roles.get, ("gate_proj", "up_proj", "down_proj")))
        is_plain = what.computed._replace(projections=(), activation=None) == Computed(layer)
    else:
        if pattern.layers != GATED or pattern.guard is not None or why_not_served(first, pattern) is not None:
            return None
        names, layer, settings = projection_names(type(first)), pattern.layer_for(first), read_settings(first)
        if pattern.name in _LOOKED_AT_BY_THE_LAYER:
            return known(first._modules[names[2]].out_features, type(first).forward)
        is_plain = settings is not None
    if layer not in GATED or None in names or not is_plain or any("." in name for name in names):
        return None
    width = getattr(first._modules[names[2]], "out_features", 0)
    return known(width, type(first).forward, settings, names, ACTIVATED_BY[layer])


def longest_list(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the name of the longest list in a module, and the list; None without one, or with two as long."""
    lists = [(name, child) for name, child in module._modules.items() if isinstance(child, nn.ModuleList)]
    lengths = [len(listed) for _, listed in lists]
    return lists[lengths.index(max(lengths))] if lengths and lengths.count(max(lengths)) == 1 else None


def shared_paths(name: str, child: Any) -> tuple[str, ...]:
    """Return the paths of the experts of all tokens in a child: itself, or those in a list."""
    if not isinstance(child, nn.ModuleList):
        return (name,)
    return tuple(f"{name}.{place}" for place, each in child._modules.items() if each is not None)


def read_gate(name: str, child: Any, experts: Experts) -> Gate | None:
    """Return what a child returns, if that may be experts of tokens and their weights, or logits; None if not."""
    if is_linear(child) and not _gives_several(child):
        return Gate(name, None, {}) if child.out_features == experts.number else None
    settings = read_settings(child, tuple(child._buffers))
    if settings is None or sum(p.numel() for p in child.parameters()) > max(
        4 * experts.number * experts.width, _LARGEST
    ):
        return None
    returned, keeps_sequences = {}, False
    for training, dtype in product((False, True), DTYPES):
        made = _random_stand_in(child, dtype, training)
        for tokens in ((2, 3), (6,)):
            found = attempt(type(child).forward, made, torch.randn(*tokens, experts.width).to(dtype))
            if isinstance(found, (Tensor, tuple, list)):
                parts = [found] if isinstance(found, Tensor) else found
                keeps_sequences |= any(map(_is_by_sequence, parts))
                by_rows = [each.flatten(0, 1) if _is_by_sequence(each) else each for each in parts]
                returned[training, dtype] = by_rows[0] if isinstance(found, Tensor) else type(found)(by_rows)
                break
    known = partial(Gate, name, settings, returned, keeps_sequences)
    if (found := returned.get((False, torch.float32))) is None:
        return None
    if isinstance(found, Tensor):
        return known() if found.shape == (6, experts.number) and found.is_floating_point() else None
    tensors = {
        p: each for p, each in enumerate(found) if isinstance(each, Tensor) and each.dim() == 2 and len(each) == 6
    }
    indices = [p for p, each in tensors.items() if not (each.is_floating_point() or each.dtype is torch.bool)]
    if len(indices) != 1:
        return None
    shape = tensors[indices[0]].shape
    weights = [p for p, each in tensors.items() if each.is_floating_point() and each.shape == shape]
    return known(indices[0], weights[0], shape[1]) if len(weights) == 1 else None


def _gives_several(child: Any) -> bool:
    """Tell whether a child that is a linear layer returns several values: it is one that chooses itself."""
    if type(child).forward is nn.Linear.forward:
        return False

    def run() -> Any:
        made = _random_stand_in(child, torch.float32, False)
        return type(child).forward(made, torch.randn(6, child.in_features))

    return isinstance(attempt(run), tuple)


def _is_by_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == (2, 3)


def _random_stand_in(module: nn.Module, dtype: torch.dtype, training: bool) -> nn.Module:
    """Return a stand-in with random numbers in the place of all weights."""

    def fill(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape).to(dtype if tensor.is_floating_point() else tensor.dtype)

    return filled(module, fill, training=training)


class AnyOperator(Watched):
    """Lets all operators pass but those of other libraries and those that draw random numbers."""

    def allows(self, function: Any, name: str) -> bool:
        """Tell whether an operator draws no random numbers."""
        return torch.Tag.nondeterministic_seeded not in function.tags

    def tensor(self, result: Any) -> Any:
        """Return all that a forward returned."""
        return result


class Stub(nn.Module):
    """Stands for a child: it gives what a function gives, and keeps what it was given."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.compute, self.is_cast = compute, True
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x)
        self.is_cast &= all(casts())
        return self.compute(x)


def expert_stub(base: Tensor, slope: Tensor) -> Stub:
    """Return what stands for an expert, or for what is called with tokens as one is: it gives others for each."""
    return Stub(lambda x: (base + slope * x.roll(1, -1)[..., : base.shape[-1]]).to(x.dtype))


def gate_stub(gives: Any, keeps_sequences: bool) -> Stub:
    """Return what stands for what chooses: it gives what there is of each token."""

    def shaped(value: Any, x: Tensor) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(shaped(each, x) for each in value)
        is_of_tokens = isinstance(value, Tensor) and value.dim() > 1 and len(value) == x.numel() // x.shape[-1]
        value = value.view(*x.shape[:-1], *value.shape[1:]) if is_of_tokens and keeps_sequences else value
        return value.clone() if isinstance(value, Tensor) else value  # without a gradient where none is asked for

    return Stub(lambda x: shaped(gives, x))
