"""Layers whose forward `kernels` binds to the functions of linear attention in transformers.

Each takes the arguments of the function that it replaces, by the same names. Where packed sequences begin and end is
read from the keywords that a model passes on: ``cu_seqlens``, ``cu_seq_lens_q`` or ``seq_idx``. Other keywords, such as
``position_ids``, are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import causal_conv1d, functional
from ._common import silu
from ._common.modules import Layer as _Layer
from .delta_rule import forget_gate
from .ssm import linear_recurrence, selective_scan

Result = tuple[Tensor, Tensor | None]


class ChunkGatedDeltaRule(_Layer):
    """Computes the gated delta rule of whole sequences; the chunks are of 64 tokens whatever ``chunk_size`` is."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = None, initial_state, output_final_state, use_qk_l2norm_in_kernel
        return functional.chunk_gated_delta_rule(query, key, value, g, beta, *options, **_sequence_bounds(kwargs))


class FusedRecurrentGatedDeltaRule(_Layer):
    """Computes the gated delta rule of one token behind a state, or of several."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = None, initial_state, output_final_state, use_qk_l2norm_in_kernel
        return functional.fused_recurrent_gated_delta_rule(
            query, key, value, g, beta, *options, **_sequence_bounds(kwargs)
        )


class ChunkKDA(_Layer):
    """Computes Kimi delta attention of whole sequences; the chunks are of 64 tokens whatever ``chunk_size`` is."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = None, initial_state, output_final_state, use_qk_l2norm_in_kernel
        return functional.chunk_kda(query, key, value, g, beta, *options, **_sequence_bounds(kwargs))


class FusedRecurrentKDA(_Layer):
    """Computes Kimi delta attention of one token behind a state, or of several."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = None, initial_state, output_final_state, use_qk_l2norm_in_kernel
        return functional.fused_recurrent_kda(query, key, value, g, beta, *options, **_sequence_bounds(kwargs))


class ForgetGate(_Layer):
    """Computes the logarithms of the decays of Kimi delta attention, with the projections before them.

    Reads ``f_a_proj``, ``f_b_proj``, ``dt_bias``, ``A_log`` and ``head_dim``.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.f_b_proj(self.f_a_proj(hidden_states))
        x = x.view(*x.shape[:2], x.shape[-1] // self.head_dim, self.head_dim)
        return forget_gate.forget_gate(x, self.dt_bias.view(-1, self.head_dim), self.A_log.view(-1, 1))


class CausalConv1d(_Layer):
    """Computes the causal convolution of each channel of whole sequences, and the activation.

    An activation other than SiLU is left to the function that is replaced. So is SiLU where hooks or replaced methods
    would see it called: transformers makes a module of it for every call.
    """

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        bounds, original = _sequence_bounds(kwargs), type(self).forward
        if original is CausalConv1d.forward or not _is_called(activation):
            return causal_conv1d.causal_conv1d_fn(hidden_states, weight, bias, activation, **bounds)
        if any(tensor is not None for tensor in bounds.values()):
            # computed here; then the original convolves with one tap of ones, and calls the activation
            hidden_states = causal_conv1d.causal_conv1d_fn(hidden_states, weight, bias, None, **bounds)
            weight, bias = weight.new_ones(len(weight), 1), None
        return original(self, hidden_states, weight, bias, activation)


class CausalConv1dBeforeScan(_Layer):
    """Computes a causal convolution before a scan that cannot keep packed sequences apart: it refuses these."""

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if any(tensor is not None for tensor in _sequence_bounds(kwargs).values()):
            raise ValueError(
                "the scan behind this convolution carries the state of a packed sequence into the next one: pass one "
                "sequence a row, padded, without seq_idx and cu_seq_lens_q"
            )
        original = type(self).forward
        if original is CausalConv1dBeforeScan.forward or not _is_called(activation):
            return causal_conv1d.causal_conv1d_fn(hidden_states, weight, bias, activation)
        return original(self, hidden_states, weight, bias, activation)


class CausalConv1dUpdate(_Layer):
    """Computes the causal convolution of new tokens behind a state, and the activation, as :class:`CausalConv1d` does.

    The state takes in the new tokens.
    """

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        original = type(self).forward
        if original is CausalConv1dUpdate.forward or not _is_called(activation):
            return causal_conv1d.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)
        return original(self, hidden_states, conv_state, weight, bias, activation)


def _is_called(activation: str | None) -> bool:
    """Tell whether an activation has to be called as a module: it is not SiLU, or somebody would see the call."""
    if activation is None:
        return False
    return activation not in causal_conv1d.ACTIVATIONS or silu.is_seen()


class RGLRU(_Layer):
    """Computes the real-gated linear recurrent unit of RecurrentGemma, with all chunks of tokens at once."""

    def forward(self, activations: Tensor, position_ids: Tensor) -> Tensor:
        reset = position_ids[:, :, None] == 0
        heads = activations.flatten(0, 1).unflatten(1, (self.num_attention_heads, self.block_width)).transpose(0, 1)
        input_gate, recurrent_gate = (
            torch.baddbmm(bias[:, None, :], heads, weight).transpose(0, 1).reshape(activations.shape).sigmoid()
            for bias, weight in (
                (self.input_gate_bias, self.input_gate_weight),
                (self.recurrent_gate_bias, self.recurrent_gate_weight),
            )
        )
        exponents = -8.0 * recurrent_gate * nn.functional.softplus(self.recurrent_param)
        decays = exponents.exp() * ~reset
        multiplier = reset + ~reset * linear_recurrence.BoundedSqrt.apply(1 - (2 * exponents).exp())
        added = activations * input_gate * multiplier.type(activations.dtype)
        states, self.recurrent_states = linear_recurrence.linear_recurrence(decays, added, self.recurrent_states)
        return states


class SelectiveScan(_Layer):
    """Computes the selective scan of Mamba's models, whatever ``use_mambapy`` and ``use_associative_scan`` are."""

    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return selective_scan.selective_scan_fn(
            hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state
        )


def _sequence_bounds(kwargs: dict[str, Any]) -> dict[str, Tensor | None]:
    """Return the keywords of a model that say where packed sequences begin and end, by their names here."""
    cu_seqlens = kwargs.get("cu_seqlens")
    return {
        "cu_seqlens": kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens,
        "seq_idx": kwargs.get("seq_idx"),
    }
