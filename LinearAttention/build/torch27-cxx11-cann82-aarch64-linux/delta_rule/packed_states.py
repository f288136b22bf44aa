"""The states behind packed sequences, which end within chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.chunk_layout import CHUNK, to_chunks
from .chunk import RuleOptions, Tokens, chunks_of, factors_of, last_state


def final_states(tokens: Tokens, between: Tensor, cu_seqlens: Tensor, options: RuleOptions) -> Tensor:
    """Compute the state behind each sequence, ``[S, H, K, V]`` in float32, without gradients.

    The chunk in which a sequence ends is computed again with the other tokens left out: a token with a key, a gate and
    a beta of zero changes nothing.

    Args:
        tokens: of one row.
        between: the states before all chunks, ``[N, H, K, V]``.
        cu_seqlens: where each sequence begins, and the last one ends, ``[S + 1]``.
        options: scale and norm.
    """
    with torch.no_grad():
        length = tokens.value.shape[1]
        begins, ends = cu_seqlens[:-1].to(between.device), cu_seqlens[1:].to(between.device)
        chunk = (ends - 1).clamp(min=0).int() // CHUNK  # CANN divides int64 on an AI CPU
        places = (chunk * CHUNK).unsqueeze(-1) + torch.arange(CHUNK, dtype=torch.int32, device=between.device)
        mine = (places >= begins.unsqueeze(-1)) & (places < ends.unsqueeze(-1))
        index = places.clamp(max=length - 1).flatten()
        parts = []
        for tensor in tokens:
            part = tensor.squeeze(0).index_select(0, index).unflatten(0, places.shape)
            parts.append(part * mine.view(*mine.shape, *[1] * (part.dim() - 2)).to(part.dtype))
        chosen = Tokens(*parts)
        chunks = chunks_of(chosen, factors_of(chosen, options), None)
        state = between.index_select(0, chunk)
        state = state * (begins < chunk * CHUNK).view(-1, 1, 1, 1).to(state.dtype)
        return last_state(chunks, to_chunks(chosen.value), state.flatten(0, 1)).unflatten(0, state.shape[:2])
