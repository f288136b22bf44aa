"""Blocks of other people's code that send tokens to experts in a list (recognition/moe_blocks/finder.py).

The gate is called as it is, and the experts of all tokens are computed at once, by FusedMoE. Where that cannot be, the
forward of the block's class loops over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.devices import awaits_weights
from kernels_ext_npu.binding.step_aside import guarded_forward
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.module_state import child_at
from kernels_ext_npu.recognition.module_settings import has_settings, is_linear
from kernels_ext_npu.recognition.moe_blocks.children import shared_paths
from kernels_ext_npu.recognition.moe_blocks.formulas import AddedLoss, Balance, MoEBlock, Routed, gained
from kernels_ext_npu.swaps.recognised.layer_forwards import Members, has_own_forward, is_as_it_was
from kernels_ext_npu.swaps.recognised.routers import choose_by

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import Recognised


def make_block_forward(what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that computes all experts at once, for blocks that were recognised as the same."""
    block: Any = what.computed.block
    modes, choice, package = dict(block.modes), block.choice, _package()
    if choice is not None:
        choose = choose_by(package, choice.gating, choice.bias is not None) if choice.has_operator else choice.choose

    def holds(module: nn.Module) -> bool:
        is_known = module.training in modes
        is_known &= block.casts or not torch.is_autocast_enabled("npu")
        return is_known and is_as_it_was(module, what.settings) and _have_settings(module, block)

    def forward(self: nn.Module, x: Tensor) -> Any:
        rows, mode = x.reshape(-1, x.shape[-1]), modes[self.training]
        experts = package.expert_lists.fusable_experts(_members(self, block), rows, block.top_k)
        if experts is None:
            return matched(self, x)
        routed = rows if block.takes_rows else x
        given = self._modules[block.gate](routed.float() if block.widens else routed)  # type: ignore[misc]
        if choice is None:
            index, weights = (given[place].flatten(0, -2) for place in (block.index_at, block.weights_at))
        else:
            bias = getattr(self, choice.bias) if choice.bias else None
            weights, index = choose(given.flatten(0, -2), bias)
            weights = gained(weights, index, getattr(self, choice.gains)) if choice.gains else weights
            given = (given,)
        with torch.no_grad() if mode.is_detached else nullcontext():
            y = package.expert_lists.fused_listed_experts(experts, rows, index, weights).view(x.shape)
        y = y if mode.loss is None else AddedLoss.apply(y, given[mode.loss])
        y = _with_shared(self, block, x, rows, y)

        def loss(balance: Balance) -> Tensor:
            return balance.compute(choice, given[0].flatten(0, -2), index)

        for name, part in mode.written:
            setattr(self, name, _returned(part, y, given, loss))
        return _returned(mode.returned, y, given, loss)

    return guarded_forward(forward, matched, holds)  # type: ignore[arg-type]


def prepare(module: nn.Module, block: MoEBlock) -> None:
    """Let the kernel remember the forwards of experts, which it does not call. It cannot while a graph is captured."""
    experts: Any = module._modules[block.experts.name]
    own = getattr(vars(experts[0]).get("forward"), "__func__", None)
    _package().expert_lists.remember_forward(experts, own)


def remark(module: nn.Module, block: MoEBlock) -> str | None:
    """Say why the experts of a block are computed one after the other, or in which mode; None if in none."""
    reason = None if awaits_weights() else _package().expert_lists.unfit(_members(module, block))
    if reason is not None:
        return f"expert by expert, since {reason}"
    modes = dict(block.modes)
    if True not in modes:
        return "but not in training, in which it is not known to compute the same"
    return None if False in modes else "but in training alone: it is not known to compute the same otherwise"


def _package() -> Any:
    return registration.package(LAYERS["GatedMoEBlock"])


def _have_settings(module: nn.Module, block: MoEBlock) -> bool:
    """Tell whether the gate and the experts are what they were."""
    children, settings = module._modules, block.experts.settings
    gate, experts = children.get(block.gate), children.get(block.experts.name)
    if not (is_linear(gate) if block.gate_settings is None else has_settings(gate, block.gate_settings)):
        return False
    if not isinstance(experts, nn.ModuleList) or len(experts) != block.experts.number:
        return False
    for name in {path.partition(".")[0] for path in block.shared}:
        if shared_paths(name, children.get(name)) != block.shared:
            return False
    compiling = torch.compiler.is_compiling()
    for expert in experts._modules.values() if compiling or settings is not None else ():
        # in a graph the kernel does not see what it remembers of their forward
        if compiling and not (has_own_forward(expert) and type(expert).forward is block.experts.forward):
            return False
        if settings is not None and not is_as_it_was(expert, settings):
            return False
    return True


def _members(module: nn.Module, block: MoEBlock) -> Members:
    """Return the experts of a block as the layer looks for them."""
    named = block.experts
    experts = module._modules[named.name]
    return Members(experts=experts, expert_projections=named.projections, expert_activation=named.activation)


def _with_shared(module: Any, block: MoEBlock, x: Tensor, rows: Tensor, y: Tensor) -> Tensor:
    """Add what the experts of all tokens give, if there are any."""
    if not block.shared:
        return y
    given = rows if block.shares_rows else x
    more = functools.reduce(torch.add, [child_at(module, path)(given).view(x.shape) for path in block.shared])
    if block.shared_gate is not None:
        more = torch.sigmoid(module._modules[block.shared_gate](x)) * more
    return y + more


def _returned(structure: Any, y: Tensor, given: Any, loss: Callable[[Balance], Tensor]) -> Any:
    """Return what a block returns: its output, beside what the gate gave, and a loss of that."""
    if structure is ...:
        return y
    if isinstance(structure, Balance):
        return loss(structure)
    if isinstance(structure, Routed):
        found = given[structure.place]
        if structure.is_by_sequence:
            return found.view(*y.shape[:-1], -1)
        return found.flatten(0, -2) if found.dim() > 2 else found
    return tuple(_returned(each, y, given, loss) for each in structure) if type(structure) is tuple else structure
