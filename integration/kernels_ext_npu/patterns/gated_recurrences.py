"""The recurrences of transformers with a gate for every channel, and what makes such gates.

The real-gated linear recurrent unit of Griffin is RecurrentGemma's: activations are ``[B, T, D]``, position_ids
``[B, T]``, states ``[B, D]``. The selective scan of the first Mamba has a gate for every channel and state:
hidden_states, dt and z are ``[B, D, T]``, A is ``[D, N]``, B and C are ``[B, N, T]``, states ``[B, D, N]``. The forget
gates of Kimi delta attention are logarithms of decays, one for each channel of a key.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils.import_utils import (
    is_mambapy_available,
    is_torch_greater_or_equal,
    is_torchdynamo_compiling,
    is_torchdynamo_exporting,
)

from kernels_ext_npu.patterns.pattern import Pattern, require, reworded

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


def selective_scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    use_mambapy=False,
    use_associative_scan=False,
    **kwargs,
):
    """Compute one token after the other, or in another way of torch that was asked for."""
    if is_torch_greater_or_equal("2.9.0"):
        from torch._higher_order_ops.associative_scan import associative_scan
    else:
        associative_scan = None
    if is_mambapy_available():
        from mambapy.pscan import pscan
    else:
        pscan = None
    batch_size, intermediate_size, seq_len = hidden_states.shape
    input_dtype = hidden_states.dtype
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    B = B.transpose(1, 2)
    C = C.transpose(1, 2)
    discrete_A = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    discrete_B = dt[:, :, :, None] * B[:, None, :, :].float()
    deltaB_u = discrete_B * hidden_states[:, :, :, None].float()
    if use_mambapy and pscan is not None:
        all_states = pscan(discrete_A.transpose(1, 2), deltaB_u.transpose(1, 2))
        scan_output = (all_states @ C.unsqueeze(-1)).squeeze(3).transpose(1, 2)
        ssm_state = all_states[:, -1]
    elif (
        use_associative_scan
        and associative_scan is not None
        and (is_torchdynamo_compiling() and (not is_torchdynamo_exporting()))
    ):

        def combine_fn(left, right):
            a_left, b_left = left
            a_right, b_right = right
            return (a_left * a_right, a_right * b_left + b_right)

        combine_mode = "pointwise" if discrete_A.device.type in ("cuda", "xpu") else "generic"
        _, all_states = associative_scan(combine_fn, (discrete_A, deltaB_u), dim=2, combine_mode=combine_mode)
        scan_output = torch.matmul(all_states.transpose(1, 2).to(input_dtype), C.unsqueeze(-1))
        scan_output = scan_output.squeeze(-1).transpose(1, 2)
        ssm_state = all_states[:, :, -1]
    else:
        ssm_state = torch.zeros(
            batch_size, intermediate_size, A.shape[-1], dtype=input_dtype, device=hidden_states.device
        )
        scan_outputs = []
        for index in range(seq_len):
            ssm_state = discrete_A[:, :, index] * ssm_state + deltaB_u[:, :, index]
            scan_output = torch.matmul(ssm_state.to(input_dtype), C[:, index, :].unsqueeze(-1))
            scan_outputs.append(scan_output[:, :, 0])
        scan_output = torch.stack(scan_outputs, dim=-1)
    if D is not None:
        scan_output = scan_output + hidden_states * D[None, :, None]
    if z is not None:
        scan_output = scan_output * F.silu(z)
    if return_last_state:
        return (scan_output, ssm_state)
    return scan_output


class KimiLinearForgetGate(nn.Module):
    def __init__(self, hidden_size: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.num_heads = head_dim, heads
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, heads * head_dim, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(heads * head_dim))
        self.A_log = nn.Parameter(torch.zeros(1, 1, heads, 1))

    def forward(self, hidden_states):
        hidden_shape = (*hidden_states.shape[:2], -1, self.head_dim)
        forget_gate = self.f_b_proj(self.f_a_proj(hidden_states))
        g = (forget_gate.float() + self.dt_bias.float().view(1, 1, -1)).view(hidden_shape)
        A_log = self.A_log.float()
        decay_rate = torch.exp(A_log)
        g_softplus = torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
        return -decay_rate * g_softplus


# may bound its gates from below
Glm5NextTextForgetGate = reworded(
    "Glm5NextTextForgetGate",
    KimiLinearForgetGate,
    {
        "self.A_log.float()": "self.A_log.float().view(1, 1, self.num_heads, 1)",
        "    g_softplus =": """
    if self.safe_gate_lower_bound is not None:
        return self.safe_gate_lower_bound * torch.sigmoid(decay_rate * g)
    g_softplus =""",
    },
)


def _is_unbounded(module: Any) -> bool:
    return module.safe_gate_lower_bound is None


_UNBOUNDED = require(_is_unbounded, "it bounds its gates by {0.safe_gate_lower_bound}")

PATTERNS = (
    Pattern(RecurrentGemmaRglru, ("RGLRU",)),
    Pattern(selective_scan, ("SelectiveScan",)),
    Pattern(KimiLinearForgetGate, ("ForgetGate",)),
    Pattern(Glm5NextTextForgetGate, ("ForgetGate",), _UNBOUNDED, holds=_is_unbounded),
)
