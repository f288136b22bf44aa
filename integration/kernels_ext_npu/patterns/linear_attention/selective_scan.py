"""The selective scan of transformers' models of the first Mamba: a gate for every channel and state.

hidden_states, dt and z are ``[B, D, T]``, A is ``[D, N]``, B and C are ``[B, N, T]``, states ``[B, D, N]``.
"""

import torch
import torch.nn.functional as F
from transformers.utils.import_utils import (
    is_mambapy_available,
    is_torch_greater_or_equal,
    is_torchdynamo_compiling,
    is_torchdynamo_exporting,
)

from kernels_ext_npu.patterns.pattern import Pattern


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


PATTERNS = (Pattern(selective_scan, ("SelectiveScan",)),)
