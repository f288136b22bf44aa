"""The states behind packed sequences, which end within chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.chunk_layout import CHUNK, to_chunks
from .chunk import last_state
from .tokens import DeltaRuleOptions, Tokens, chunk_tokens, norm_factors


def final_states(tokens: Tokens, chunk_states: Tensor, cu_seqlens: Tensor, options: DeltaRuleOptions) -> Tensor:
    """Compute the state behind each sequence, ``[S, H, K, V]`` in float32, without gradients.

    The chunk in which a sequence ends is computed again, with all arguments of other sequences' tokens set to zero:
    such a token leaves the state as it is.

    Args:
        tokens: of one row.
        chunk_states: the states before all chunks, ``[N, H, K, V]``.
        cu_seqlens: where each sequence begins, and the last one ends, ``[S + 1]``.
        options: scale and norm.
    """
    with torch.no_grad():
        length = tokens.value.shape[1]
        begins, ends = cu_seqlens[:-1].to(chunk_states.device), cu_seqlens[1:].to(chunk_states.device)
        last_chunk = (ends - 1).clamp(min=0).int() // CHUNK  # CANN divides int64 on an AI CPU
        offsets = torch.arange(CHUNK, dtype=torch.int32, device=chunk_states.device)
        places = (last_chunk * CHUNK).unsqueeze(-1) + offsets
        is_own = (places >= begins.unsqueeze(-1)) & (places < ends.unsqueeze(-1))
        index = places.clamp(max=length - 1).flatten()
        parts = []
        for tensor in tokens:
            part = tensor.squeeze(0).index_select(0, index).unflatten(0, places.shape)
            parts.append(part * is_own.view(*is_own.shape, *[1] * (part.dim() - 2)).to(part.dtype))
        selected = Tokens(*parts)
        chunks = chunk_tokens(selected, norm_factors(selected, options), None)
        state = chunk_states.index_select(0, last_chunk)
        state = state * (begins < last_chunk * CHUNK).view(-1, 1, 1, 1).to(state.dtype)  # zeros where it begins
        return last_state(chunks, to_chunks(selected.value), state.flatten(0, 1)).unflatten(0, state.shape[:2])
