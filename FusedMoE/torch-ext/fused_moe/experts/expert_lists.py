"""Blocks whose experts are a list of modules: what their projections are, and all of them in grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.nn.modules import linear

from .._common.adjacent_storage import are_neighbours
from .._common.derivatives import is_transformed
from .._common.distributed import is_distributed
from .._common.modules import has_values
from ..expert_activation import SWIGLU
from ..module_guards import is_intercepted, is_replaced, remember_forward
from ..ops import gmm, permutation
from ..ops.hybrid_gmm import HybridGmmFunction
from .listed_autograd import ListedExpertsFunction

__all__ = ["ListedExperts", "fusable_experts", "fused_listed_experts", "is_silu", "remember_forward", "unfit"]

THREE_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down
# torch's own: somebody may have put another in its place, before or since
_FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(linear) else None

# the activations that were looked at; nothing is left on a module that may be saved
_silu: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()


class ListedExperts(NamedTuple):
    """Holds what a list of experts consists of.

    Attributes:
        gate: the weights, one for each expert, ``[I, H]``, then the biases ``[I]`` if there are any.
        up: the weights and biases of up, in the same shapes and order.
        down: the weights ``[H, I]``, and the biases ``[H]``.
        has_bias: whether biases follow the weights: of gate, up and down.
        is_packed: whether each expert's weights of gate and up lie side by side, the gate first.
        is_swiglu: whether they do, and the activation is SiLU.
        activation: what the gate goes through before it is multiplied with up.
    """

    gate: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]
    has_bias: tuple[bool, bool, bool]
    is_packed: bool
    is_swiglu: bool
    activation: Callable[[Tensor], Tensor]


def unfit(block: Any) -> str | None:
    """Say why the experts of a block are computed one after the other; None if they are not.

    Args:
        block: has the list of its experts as ``experts``. Where these have other names for their projections, it has
            those of gate, up and down as ``expert_projections``, and the activation as ``expert_activation``.

    Returns:
        A clause that follows "since". It says nothing of what a call decides: :func:`fusable_experts` has the rest.
    """
    found = _collect(block)
    return found if isinstance(found, str) else None


def fusable_experts(block: Any, hidden_states: Tensor, top_k: int) -> ListedExperts | None:
    """Return the experts of a block that sends each token to ``top_k``; None where they are computed one by one.

    The reasons are what :func:`unfit` says, and: limits of the operators, another dtype, also by autocast, the CPU, and
    that torch transforms what runs: functorch.py of the common files.
    """
    if hidden_states.device.type != "npu" or is_transformed() or is_distributed(hidden_states):
        return None
    if torch.is_autocast_enabled("npu") and torch.get_autocast_dtype("npu") != hidden_states.dtype:
        return None
    found = _collect(block)
    if isinstance(found, str):
        return None
    weight = found.gate[0]
    inner, size = weight.shape
    fits = gmm.fits_sizes(hidden_states, len(block.experts), (1 + found.is_packed) * inner, size)
    fits = fits and permutation.fits_sizes(hidden_states.numel() // size, top_k)
    same = (weight.dtype, weight.device) == (hidden_states.dtype, hidden_states.device)
    return found if fits and same and hidden_states.shape[-1] == size else None


def fused_listed_experts(
    experts: ListedExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of a list on the tokens that a router sent to them, weighed and summed. Differentiable.

    Permute, one product for gate and up where they are packed and two otherwise, activation, product, unpermute.

    Args:
        experts: what :func:`fusable_experts` gave for ``hidden_states``.
        hidden_states: ``[T, H]``, of the dtype of the weights.
        top_k_index: int64 or int32 ``[T, k]``, from 0 to E - 1, which is not checked.
        top_k_weights: ``[T, k]``, of any floating dtype.

    Returns:
        ``[T, H]``, in the dtype of ``hidden_states``.
    """
    gate_bias, up_bias, down_bias = experts.has_bias
    number = len(experts.down) // (1 + down_bias)
    x, index, weights = (tensor.contiguous() for tensor in (hidden_states, top_k_index, top_k_weights))
    (gate, gate_biases), (up, up_biases) = ((p[:number], p[number:]) for p in (experts.gate, experts.up))
    both = *gate, *up, *gate_biases, *up_biases
    if experts.is_swiglu and SWIGLU.fits(2 * gate[0].shape[0], x.dtype):
        return ListedExpertsFunction.apply(x, index, weights, number, (gate_bias, down_bias), *both, *experts.down)
    rows, order = permutation.PermuteFunction.apply(x, index)
    counts = permutation.tokens_per_expert(index, number)
    if experts.is_packed:
        a, b = HybridGmmFunction.apply(rows, counts, None, gate_bias, *both).chunk(2, -1)
    else:
        a = HybridGmmFunction.apply(rows, counts, None, gate_bias, *experts.gate)
        b = HybridGmmFunction.apply(rows, counts, None, up_bias, *experts.up)
    activated = (experts.activation(a) * b).contiguous()
    y = HybridGmmFunction.apply(activated, counts, None, down_bias, *experts.down)
    return permutation.UnpermuteFunction.apply(y, order, weights, index)


def _collect(block: Any) -> ListedExperts | str:
    """Return the experts, or why they cannot be taken together. It looks at the host's objects only.

    Experts can be replaced and hooks added at any time: nothing is remembered.
    """
    experts = block.experts
    modules: list[Any] = list(experts._modules.values())
    names = getattr(block, "expert_projections", None)
    if names is None:
        names = next((names for names in THREE_PROJECTIONS if modules and names[0] in modules[0]._modules), None)
    if names is None:
        return f"the projections of the experts are none of {', '.join(name for n in THREE_PROJECTIONS for name in n)}"
    if any(is_intercepted(expert) for expert in modules):
        return "an expert has hooks or a wrapped forward, which one product would pass by"
    if is_replaced(experts):
        return "the forward of an expert was replaced"
    parameters, has_bias = [], []
    for name in names:
        found = _parameters([expert._modules.get(name) for expert in modules])
        if isinstance(found, str):
            return found
        weights, biases = found
        parameters.append(weights + biases)
        has_bias.append(bool(biases))
    given = getattr(block, "expert_activation", None)
    activations = [expert.act_fn for expert in modules] if given is None else [given]
    activation = activations[0]
    if any(type(each) is not type(activation) for each in activations):
        return "the experts differ in their activation"
    if any(is_intercepted(each) for each in set(activations) if isinstance(each, nn.Module)):
        return "an activation has hooks, which one launch would pass by"
    gate, up, down = parameters
    fits = gate[0].shape == up[0].shape == down[0].shape[::-1]
    if not fits or any((a.dtype, a.device) != (b.dtype, b.device) for a, b in ((gate[0], up[0]), (gate[0], down[0]))):
        return "the projections differ in size, dtype or device"
    is_packed = has_bias[0] == has_bias[1] and _is_packed(gate[: len(modules)], up[: len(modules)])
    is_swiglu = is_packed and is_silu(activation)
    return ListedExperts(gate, up, down, (has_bias[0], has_bias[1], has_bias[2]), is_packed, is_swiglu, activation)


def _parameters(projections: list[nn.Module | None]) -> tuple[list[Tensor], list[Tensor]] | str:
    """Return the weights and the biases of one projection of all experts, or why they cannot be taken together."""
    if nn.Linear.forward is not _FORWARD:
        return "the forward of all linear layers was replaced"
    for projection in projections:
        if type(projection) is not nn.Linear:
            kind = type(projection)
            return f"a projection is a {kind.__module__}.{kind.__name__}"
        if is_intercepted(projection):
            return "a projection has hooks or a wrapped forward, which one product would pass by"
    weights = [projection._parameters["weight"] for projection in projections]
    biases = [projection._parameters["bias"] for projection in projections]
    present = [bias for bias in biases if bias is not None]
    if len(present) not in (0, len(biases)):
        return "only some experts have a bias"
    for parameters in filter(None, (weights, present)):
        shape, dtype, device = parameters[0].shape, parameters[0].dtype, parameters[0].device
        for parameter in parameters:
            if type(parameter) is not nn.Parameter and type(parameter) is not FakeTensor:
                return f"a weight is a {type(parameter).__name__}"
            if parameter.is_meta:
                return "a weight is offloaded"
            if not parameter.is_contiguous():
                return "a weight is not contiguous"
            if parameter.shape != shape or parameter.dtype != dtype or parameter.device != device:
                return "the experts differ in size, dtype or device"
    if present and present[0].dtype != weights[0].dtype:
        return "the projections differ in size, dtype or device"
    return weights, present


def _is_packed(gates: list[Tensor], ups: list[Tensor]) -> bool:
    """Tell whether the weights of up lie directly behind those of the gate. A compiler does not see how weights lie."""
    if torch.compiler.is_compiling():
        return False
    return all(are_neighbours(gate, up) for gate, up in zip(gates, ups))


def is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Tell by its values, which are looked at once for a forward, whether an activation is SiLU."""
    if not isinstance(activation, nn.Module):
        return activation is F.silu
    own = activation.__dict__.get("forward")
    forwards = type(activation).forward, getattr(own, "__func__", own)  # a method would keep the module
    if activation not in _silu or _silu[activation][0] != forwards:
        _silu[activation] = forwards, has_values(activation, F.silu)
    return _silu[activation][1]
