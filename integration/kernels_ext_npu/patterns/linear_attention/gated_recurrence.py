"""The real-gated linear recurrent unit of Griffin, as RecurrentGemma has it: a gate for every channel.

activations are ``[B, T, D]``, position_ids ``[B, T]``, states ``[B, D]``.
"""

import torch
from torch import nn

from kernels_ext_npu.patterns.pattern import Pattern

_MAX_SQRT_GRADIENT = 1000.0


class SqrtBoundDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        clipped_x_times_4 = torch.clip(4.0 * x, min=1 / _MAX_SQRT_GRADIENT**2)
        return grad_output / torch.sqrt(clipped_x_times_4)


class RecurrentGemmaRglru(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.num_attention_heads, self.block_width = heads, width // heads
        self.recurrent_param = nn.Parameter(torch.zeros(width))
        square, row = (heads, width // heads, width // heads), (heads, width // heads)
        self.input_gate_weight = nn.Parameter(torch.zeros(square))
        self.input_gate_bias = nn.Parameter(torch.zeros(row))
        self.recurrent_gate_weight = nn.Parameter(torch.zeros(square))
        self.recurrent_gate_bias = nn.Parameter(torch.zeros(row))
        self.recurrent_states = None

    def forward(self, activations, position_ids):
        batch_size, seq_len, lru_width = activations.shape
        reset = position_ids[:, :, None] == 0
        reshape_act = activations.reshape(batch_size * seq_len, self.num_attention_heads, self.block_width)
        reshape_act = reshape_act.permute(1, 0, 2)
        res = torch.baddbmm(self.input_gate_bias[:, None, :], reshape_act, self.input_gate_weight)
        input_gate = torch.sigmoid(res.transpose(0, 1).reshape(batch_size, seq_len, lru_width))
        res = torch.baddbmm(self.recurrent_gate_bias[:, None, :], reshape_act, self.recurrent_gate_weight)
        recurrent_gate = torch.sigmoid(res.transpose(0, 1).reshape(batch_size, seq_len, lru_width))
        log_recurrent_gate = -8.0 * recurrent_gate * nn.functional.softplus(self.recurrent_param)
        recurrent_gate = torch.exp(log_recurrent_gate)
        a_square = torch.exp(2 * log_recurrent_gate)
        gated_inputs = activations * input_gate
        multiplier = SqrtBoundDerivative.apply(1 - a_square)
        multiplier = reset + ~reset * multiplier
        normalized_x = gated_inputs * multiplier.type(activations.dtype)
        hidden_states, recurrent_states = self._rnn_scan(
            hidden_states=normalized_x,
            recurrent_gate=recurrent_gate,
            reset=reset,
            recurrent_states=self.recurrent_states,
        )
        self.recurrent_states = recurrent_states
        return hidden_states

    def _rnn_scan(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype=torch.float32):
        recurrent_gate = recurrent_gate * ~reset
        if hidden_states.shape[1] == 1:
            if recurrent_states is None:
                return (hidden_states, hidden_states[:, 0].type(acc_dtype))
            else:
                contextualized_states = recurrent_gate.type(acc_dtype) * recurrent_states[:, None].to(
                    recurrent_gate.device
                )
                contextualized_states += hidden_states.type(acc_dtype)
                return (contextualized_states.type(hidden_states.dtype), contextualized_states[:, -1])
        else:
            if recurrent_states is None:
                recurrent_states = torch.zeros(hidden_states[:, 0].shape, dtype=acc_dtype, device=hidden_states.device)
            contextualized_states = torch.zeros_like(hidden_states)
            for t in range(hidden_states.shape[1]):
                recurrent_states = recurrent_gate[:, t].type(acc_dtype) * recurrent_states.to(recurrent_gate.device)
                recurrent_states = recurrent_states + hidden_states[:, t].type(acc_dtype)
                contextualized_states[:, t] = recurrent_states.type(hidden_states.dtype)
        return (contextualized_states, recurrent_states)


PATTERNS = (Pattern(RecurrentGemmaRglru, ("RGLRU",)),)
