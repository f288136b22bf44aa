"""Experts in grouped products on the software device: values and gradients against float64, token by token."""

from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.comparing import TOLERANCE
from kernels_ext_npu.selftest.functions.norms import gated, gelu_tanh
from tests.support import npu_counts

swiglu = gated(F.silu)


def clipped(h: Tensor, alpha: float, limit: float, offset: float, interleaved: bool) -> Tensor:
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def relu_squared(h: Tensor) -> Tensor:
    return F.relu(h).square()


def token_by_token(x, index, weights, gate_up, down, gate_up_bias, down_bias, activation, norm) -> Tensor:
    """Weights are [E, K, N]; an index of E adds nothing."""
    rows = []
    for token, experts, shares in zip(x, index.tolist(), weights):
        row = 0 * token
        for expert, share in zip(experts, shares):
            if expert < len(down):
                h = token @ gate_up[expert] + (0 if gate_up_bias is None else gate_up_bias[expert])
                y = activation(h) @ down[expert] + (0 if down_bias is None else down_bias[expert])
                row = row + share * (y if norm is None else norm(y))
        rows.append(row)
    return torch.stack(rows)


class Case:
    """Arguments for fused_experts, and the same for the truth."""

    def __init__(self, experts, tokens, k, hidden, inner, *, gated=True, bias=False, transposed=False, partial=False):
        """Index E stands for an expert that lives elsewhere, with weight zero."""
        self.transposed, self.partial = transposed, partial
        width = 2 * inner if gated else inner
        self.x = torch.randn(tokens, hidden)
        self.gate_up = torch.randn(experts, hidden, width) / hidden**0.5
        self.down = torch.randn(experts, inner, hidden) / inner**0.5
        self.biases = (torch.randn(experts, width), torch.randn(experts, hidden)) if bias else (None, None)
        self.index = torch.rand(tokens, experts + partial).topk(k, -1).indices
        self.weights = torch.rand(tokens, k).masked_fill(self.index == experts, 0)
        self.grad = torch.randn(tokens, hidden)

    def truth(self, activation, norm=None) -> list[Tensor]:
        given = (self.x, self.gate_up, self.down, *self.biases)
        leaves = [t if t is None else t.double().requires_grad_() for t in given]
        weights = self.weights.double().requires_grad_()
        x, *parameters = leaves
        y = token_by_token(x, self.index, weights, *parameters, activation, norm)
        leaves = [leaf for leaf in (*leaves, weights) if leaf is not None]
        gradients = torch.autograd.grad(y, leaves, self.grad.double(), allow_unused=True, materialize_grads=True)
        return [y.detach(), *gradients]

    def found(self, kernel, activation, norm=None, index_dtype=torch.int64, turned=False) -> list[Tensor]:
        """Weights that are ``turned`` lie the other way around in memory, and so do their gradients."""
        matrices = [m if self.transposed else m.mT.contiguous() for m in (self.gate_up, self.down)]
        matrices = [matrix.mT.contiguous().mT if turned else matrix for matrix in matrices]
        given = (self.x, *matrices, *self.biases)
        leaves = [None if value is None else value.npu().requires_grad_() for value in given]
        weights = self.weights.npu().requires_grad_()
        x, *parameters = leaves
        y = kernel.fused_experts(
            x,
            self.index.to("npu", index_dtype),
            weights,
            *parameters,
            activation=activation,
            is_transposed=self.transposed,
            is_expert_parallel=self.partial,
            post_expert_norm=norm,
        )
        y.backward(self.grad.npu())
        assert all(leaf is None or leaf.grad.is_contiguous() == leaf.is_contiguous() for leaf in leaves)
        gradients = [leaf if leaf is None else leaf.grad for leaf in leaves]
        if not self.transposed:
            gradients[1:3] = [gradient.mT for gradient in gradients[1:3]]
        return [y.detach(), *(g for g in gradients if g is not None), weights.grad]


def agree(found: list[Tensor], truth: list[Tensor], tolerance: float = TOLERANCE[torch.float32]) -> None:
    """In norm; what nearly cancels, by a tenth of the largest of them."""
    scale = max(value.norm() for value in truth)
    for a, b in zip(found, truth, strict=True):
        assert a.isfinite().all()
        assert (a.cpu().double() - b).norm() <= tolerance * max(b.norm(), 0.1 * scale)


def activations(kernel) -> dict[str, tuple]:
    """What lies between the products, for the kernel and for the truth."""
    interleaved, halves = (1.702, 7.0, 1.0, True), (1.0, 2.0, 0.0, False)
    return {
        "swiglu": (kernel.SWIGLU, swiglu),
        "clipped": (kernel.Gate(*interleaved), lambda h: clipped(h, *interleaved)),
        "clipped halves": (kernel.Gate(*halves), lambda h: clipped(h, *halves)),
        "geglu": (kernel.Gate(gelu=True), gated(gelu_tanh)),
        "gelu gate": (gated(F.gelu), gated(F.gelu)),
        "no gate": (relu_squared, relu_squared),
    }


@st.composite
def cases(draw) -> tuple[Case, str, torch.dtype, bool, bool]:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    activation = draw(st.sampled_from(["swiglu", "clipped", "clipped halves", "geglu", "gelu gate", "no gate"]))
    partial = draw(st.booleans())
    experts = draw(st.integers(1, 9))
    case = Case(
        experts,
        draw(st.integers(1, 12)),
        draw(st.integers(1, experts)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from([9, 16, 32])),  # the gradient of npu_swiglu takes multiples of 16
        gated=activation != "no gate",
        bias=draw(st.booleans()),
        transposed=draw(st.booleans()),
        partial=partial,
    )
    if draw(st.booleans()) and not partial:  # all tokens to the same experts
        case.index = case.index[:1].expand_as(case.index).contiguous()
    return case, activation, draw(st.sampled_from([torch.int32, torch.int64])), draw(st.booleans()), draw(st.booleans())


@given(cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_values_and_gradients_are_those_of_each_token_alone(kernel, drawn) -> None:
    case, name, index_dtype, normed, turned = drawn
    norm = torch.square if normed else None
    ours, exact = activations(kernel)[name]
    npu_counts.reset()
    found = case.found(kernel, ours, norm=norm, index_dtype=index_dtype, turned=turned)
    assert npu_counts.read()["stream_syncs"] == npu_counts.read()["device_to_host_copies"] == 0
    agree(found, case.truth(exact, norm=norm))


@pytest.mark.parametrize(("needs", "products"), [("tokens", 4), ("weights", 5), ("routing", 2), ("nothing", 2)])
def test_only_what_is_asked_for_gets_a_gradient(kernel, needs, products) -> None:
    case = Case(4, 16, 2, 32, 32)
    x, gate_up, down = (value.to("npu") for value in (case.x, case.gate_up.mT.contiguous(), case.down.mT.contiguous()))
    weights = case.weights.npu()
    leaves = {"tokens": [x], "weights": [gate_up, down], "routing": [weights], "nothing": []}[needs]
    for leaf in leaves:
        leaf.requires_grad_()
    npu_counts.reset()
    y = kernel.fused_experts(x, case.index.npu(), weights, gate_up, down)
    if leaves:
        y.backward(case.grad.npu())
    assert npu_counts.read()["npu_grouped_matmul"] == products


def test_the_gradient_of_old_releases_is_the_same(kernel, monkeypatch) -> None:
    """op-plugin 7.1 has no operators for the gradients of permute and unpermute."""
    cases = [Case(6, 24, 3, 16, 32, bias=True), Case(6, 24, 3, 16, 32, partial=True)]
    expected = [case.found(kernel, kernel.SWIGLU) for case in cases]
    monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.permutation"), "has_gradients", lambda: False)
    for case, before in zip(cases, expected):
        npu_counts.reset()
        fused, own = case.found(kernel, kernel.SWIGLU), case.found(kernel, swiglu)
        counters = npu_counts.read()
        assert not any("grad" in name and "npu_moe" in name for name in counters)
        assert counters["stream_syncs"] == 0
        agree(fused, [value.cpu().double() for value in before])
        agree(own, case.truth(swiglu))


@pytest.mark.parametrize("sizes", [(1100, 5, 2, 8, 16), (3, 5, 2, 65536, 1)], ids=["experts", "width"])
def test_sizes_that_the_operator_does_not_take_are_right_all_the_same(kernel, sizes) -> None:
    case = Case(*sizes)
    npu_counts.reset()
    found = case.found(kernel, kernel.SWIGLU)
    assert "npu_grouped_matmul" not in npu_counts.read()
    agree(found, case.truth(swiglu), tolerance=65536**0.5 * 2**-24)  # of sums of so many


def test_no_tokens_give_no_rows(kernel) -> None:
    case = Case(4, 1, 2, 8, 16)
    x = torch.empty(0, 8, device="npu")
    index, weights = torch.empty(0, 2, dtype=torch.long, device="npu"), torch.empty(0, 2, device="npu")
    y = kernel.fused_experts(x, index, weights, case.gate_up.mT.npu(), case.down.mT.npu())
    assert y.shape == (0, 8)


def test_tokens_of_another_dtype_than_the_weights_come_back_in_their_own(kernel) -> None:
    case = Case(4, 9, 2, 32, 32)
    parameters = [value.mT.contiguous().npu().bfloat16() for value in (case.gate_up, case.down)]
    y = kernel.fused_experts(case.x.npu(), case.index.npu(), case.weights.npu(), *parameters)
    assert y.dtype is torch.float32
