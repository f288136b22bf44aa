"""Hyper-connections of transformers: weights with which residual streams become one, and a block's result all of them.

Streams are ``[B, S, N, H]``.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils.generic import maybe_autocast

from kernels_ext_npu.patterns.pattern import Part, Pattern, require
from kernels_ext_npu.patterns.rms_norms import DeepseekV4UnweightedRMSNorm


class HYV4UnweightedRMSNorm(nn.Module):
    """The scale of a norm, and not what it norms."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class DeepseekV4HyperConnection(nn.Module):
    def __init__(self, hidden_size: int, streams: int = 4, rounds: int = 20) -> None:
        super().__init__()
        self.hc_mult, self.hc_sinkhorn_iters, self.hc_eps = streams, rounds, 1e-6
        self.input_norm = DeepseekV4UnweightedRMSNorm()
        size = (2 + streams) * streams
        self.fn = nn.Parameter(torch.zeros(size, streams * hidden_size))
        self.base = nn.Parameter(torch.zeros(size))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, hidden_streams):
        batch_size, seq_len = hidden_streams.shape[:2]
        hc = self.hc_mult
        flattened = hidden_streams.view(batch_size, seq_len, -1).float()
        flattened = self.input_norm(flattened)
        flattened = F.linear(flattened, self.fn.float())
        pre_w, post_w, comb_w = flattened.split([hc, hc, hc * hc], dim=-1)
        pre_b, post_b, comb_b = self.base.split([hc, hc, hc * hc])
        pre_scale, post_scale, comb_scale = self.scale.unbind(0)
        comb_w = comb_w.view(*comb_w.shape[:-1], hc, hc)
        comb_b = comb_b.view(hc, hc)
        pre = torch.sigmoid(pre_w * pre_scale + pre_b) + self.hc_eps
        post = 2 * torch.sigmoid(post_w * post_scale + post_b)
        comb = torch.softmax(comb_w * comb_scale + comb_b, dim=-1) + self.hc_eps
        comb = comb / (comb.sum(dim=-2, keepdim=True) + self.hc_eps)
        for _ in range(self.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + self.hc_eps)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + self.hc_eps)
        collapsed = (pre.unsqueeze(-1) * hidden_streams).sum(dim=2).to(hidden_streams.dtype)
        return post, comb, collapsed


class HYV4HyperConnection(nn.Module):
    def __init__(self, hidden_size: int, streams: int = 4, magnitude: float = 2.0) -> None:
        super().__init__()
        self.hc_mult, self.hc_eps, self.hc_post_magnitude = streams, 1e-6, magnitude
        self.input_norm = HYV4UnweightedRMSNorm()
        self.fn = nn.Parameter(torch.zeros(2 * streams, streams * hidden_size))
        self.base = nn.Parameter(torch.zeros(2 * streams))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, hidden_streams):
        device_type = hidden_streams.device.type
        with maybe_autocast(device_type=device_type, enabled=False):
            flat = hidden_streams.flatten(2).float()
            mixes = F.linear(flat, self.fn.float()) * self.input_norm(flat)
            pre_b, post_b = self.base.split(self.hc_mult, dim=-1)
            pre_scale, post_scale = self.scale.unbind(0)
            pre_logits, post_logits = mixes.split(self.hc_mult, dim=-1)
            pre = torch.sigmoid(pre_logits * pre_scale + pre_b) + self.hc_eps
            post = self.hc_post_magnitude * torch.sigmoid(post_logits * post_scale + post_b) + self.hc_eps
            out = torch.sum(pre.unsqueeze(-1) * hidden_streams, dim=2)
        return post, out.to(hidden_streams.dtype)


class DeepseekV4HyperHead(nn.Module):
    norm: type[nn.Module] = DeepseekV4UnweightedRMSNorm

    def __init__(self, hidden_size: int, streams: int = 4) -> None:
        super().__init__()
        self.eps = 1e-6
        self.input_norm = self.norm()
        self.hc_fn = nn.Parameter(torch.zeros(streams, streams * hidden_size))
        self.hc_base = nn.Parameter(torch.zeros(streams))
        self.hc_scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        flat = self.input_norm(x.flatten(2).float())
        mixes = F.linear(flat, self.hc_fn.float())
        pre = torch.sigmoid(mixes * self.hc_scale.float() + self.hc_base.float()) + self.eps
        return (pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype)


class HYV4HyperHead(DeepseekV4HyperHead):
    norm = HYV4UnweightedRMSNorm

    def forward(self, x):
        device_type = x.device.type
        with maybe_autocast(device_type=device_type, enabled=False):
            flat = x.flatten(2).float()
            mixes = F.linear(flat, self.hc_fn.float()) * self.input_norm(flat)
            pre = torch.sigmoid(mixes * self.hc_scale.float() + self.hc_base.float()) + self.eps
            out = (pre.unsqueeze(-1) * x).sum(dim=2)
        return out.to(x.dtype)


_ROUNDS = require(
    lambda module: module.hc_eps > 0 and module.hc_sinkhorn_iters >= 1,
    "hc_eps is {0.hc_eps} and hc_sinkhorn_iters {0.hc_sinkhorn_iters}: its weights may have no logarithm",
)
_NORMED = (Part("input_norm", (DeepseekV4UnweightedRMSNorm,), "its input_norm is a {}"),)
_SCALED = (Part("input_norm", (HYV4UnweightedRMSNorm,), "its input_norm is a {}"),)
PATTERNS = (
    Pattern(DeepseekV4HyperConnection, ("HyperConnection",), _ROUNDS, parts=_NORMED),
    Pattern(HYV4HyperConnection, ("IndependentHyperConnection",), parts=_SCALED),
    Pattern(DeepseekV4HyperHead, ("HyperHead",), parts=_NORMED),
    Pattern(HYV4HyperHead, ("HyperHead",), parts=_SCALED),
)
