"""Products and experts in torch, group by group: for the CPU, and for what the operators do not take.

Products are ``mm`` and ``bmm``: ``matmul`` has derivatives of torch_npu's own, of which the third is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import TransformType


def product_in_torch(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x[r] @ weight[e] + bias[e]`` for the rows of each group, and zeros after the last group.

    The host waits for ``counts``, unless there are no rows. Shapes are those of :func:`fused_moe.grouped_matmul`.

    Raises:
        ValueError: the groups have more rows than ``x``.
    """
    # on the meta device there are no counts: any rows have the shape of the result
    sizes = [0] * counts.shape[0] if not x.shape[0] else [x.shape[0]] if counts.is_meta else counts.tolist()
    if sum(sizes) > x.shape[0]:
        raise ValueError(f"grouped_matmul: counts must add up to the {x.shape[0]} rows of x, got {sum(sizes)}")
    parts = []
    for group, rows in enumerate(x.split([*sizes, x.shape[0] - sum(sizes)])):
        if group == len(sizes):
            parts.append(x.new_zeros(rows.shape[0], weight.shape[2]))
        elif rows.shape[0] or not group:  # without any row, too, the weights stay in the graph of autograd
            part = rows.mm(weight[group])
            parts.append(part if bias is None else part + bias[group].to(part.dtype))
    return torch.cat(parts)


def experts_in_torch(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    post_expert_norm: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Compute what :func:`fused_moe.fused_experts` does, with weights ``[E, K, N]``: ``[T, H]``.

    Under ``vmap`` nobody knows how many rows an expert gets: there every expert computes a row for every token.
    """
    parameters = gate_up, down, gate_up_bias, down_bias
    if _is_vmapped():
        return _every_expert(hidden_states, top_k_index, top_k_weights, parameters, activation, post_expert_norm)
    experts, choices = top_k_index.reshape(-1).sort(stable=True)
    counts = (experts.unsqueeze(-1) == torch.arange(down.shape[0], device=experts.device)).sum(0)
    tokens = choices // top_k_index.shape[1]
    rows = activation(product_in_torch(hidden_states[tokens], gate_up, counts, gate_up_bias))
    rows = product_in_torch(rows, down, counts, down_bias)
    rows = rows if post_expert_norm is None else post_expert_norm(rows)
    absent = (experts >= down.shape[0]).unsqueeze(-1)
    weighed = (rows * top_k_weights.reshape(-1)[choices].unsqueeze(-1)).masked_fill(absent, 0)
    # summed as transformers does: by token, in the dtype of the weighed rows
    by_choice = torch.zeros_like(weighed).index_copy(0, choices, weighed)
    return by_choice.view(*top_k_index.shape, hidden_states.shape[1]).sum(1).to(hidden_states.dtype)


def _every_expert(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    activation: Callable[[Tensor], Tensor],
    post_expert_norm: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Compute it without asking how many rows an expert gets: of ``[E, T, H]``, zero where it gets none."""
    gate_up, down, gate_up_bias, down_bias = parameters
    numbers = torch.arange(down.shape[0], device=top_k_index.device).view(-1, 1, 1)
    chosen = top_k_index == numbers
    rows = torch.where(chosen.any(-1, keepdim=True), hidden_states, 0)
    rows = rows.bmm(gate_up)
    rows = rows if gate_up_bias is None else rows + gate_up_bias.unsqueeze(1).to(rows.dtype)
    rows = activation(rows.flatten(0, 1)).unflatten(0, chosen.shape[:2]).bmm(down)
    rows = rows if down_bias is None else rows + down_bias.unsqueeze(1).to(rows.dtype)
    rows = rows if post_expert_norm is None else post_expert_norm(rows.flatten(0, 1)).view_as(rows)
    weights = torch.where(chosen, top_k_weights, 0).sum(-1, keepdim=True)
    return (rows * weights).sum(0).to(hidden_states.dtype)


def _is_vmapped() -> bool:
    """Tell whether a ``vmap`` of torch.func runs; a compiler, which does not see which transforms do, takes it so."""
    if not torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():
        return True
    return any(level.key() == TransformType.Vmap for level in torch._C._functorch.get_interpreter_stack() or ())
