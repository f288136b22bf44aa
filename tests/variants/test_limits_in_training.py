"""What training asks of operators that some releases of CANN refuse: the same gradients on this release, in float64.

The software device refuses what the release refuses; what is launched is counted, so that no release gets less than it
takes, and no newer one waits for what 8.2 waits for.
"""

import pytest
import torch
from torch import Tensor

import softnpu

RELEASE = tuple(int(part) for part in torch.version.cann.split(".")[:2])
# op-plugin 7.1.0 sums over no groups, whatever CANN it is on
SUMS_GROUPS = RELEASE >= (8, 3) and hasattr(torch.ops.npu, "npu_moe_token_permute_grad")
ONE_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of sums in float32


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launched(name: str) -> int:
    return softnpu.counters().get(name, 0)


def assert_close(found: Tensor, exact: Tensor, tolerance: float) -> None:
    assert (found.detach().cpu().double() - exact.detach()).norm() <= tolerance * exact.norm()


# ---- experts --------------------------------------------------------------------------------------------------------
def in_float64(x: Tensor, weights: list[Tensor], counts: list[int], bias: Tensor | None) -> Tensor:
    parts = zip(x.split(counts), weights, [0.0] * len(counts) if bias is None else bias)
    return torch.cat([rows @ weight + offset for rows, weight, offset in parts])


@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "listed"])
@pytest.mark.parametrize("dtype", ONE_ROUNDING, ids=str)
def test_gradients_of_experts_weights_need_no_sums_of_groups(kernels, dtype, listed) -> None:
    """The host waits for the counts in float32 alone, and on no release that sums over groups."""
    moe, counts = kernels["FusedMoE"], [3, 0, 5, 1]
    x, grad = randn(9, 24, dtype=dtype), randn(9, 40, seed=1, dtype=dtype)
    weights, bias = randn(4, 40, 24, seed=2, dtype=dtype), randn(4, 40, seed=3, dtype=dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, weights, bias)]
    in_float64(exact[0], [weight.T for weight in exact[1]], counts, exact[2]).backward(grad.double())

    sizes = torch.tensor(counts).npu()
    if listed:
        leaves = [tensor.npu().requires_grad_() for tensor in (x, *weights, *bias)]
        y = moe.HybridGmmFunction.apply(leaves[0], sizes, None, True, *leaves[1:])
    else:
        leaves = [tensor.npu().requires_grad_() for tensor in (x, weights, bias)]
        y = moe.grouped_matmul(leaves[0], leaves[1].mT, sizes, leaves[2])
    given = grad.npu()
    softnpu.reset_counters()
    y.backward(given)
    added = 0 if SUMS_GROUPS or dtype is torch.float32 else 2
    assert launched("npu_grouped_matmul") == (3 if SUMS_GROUPS else 1)
    assert launched("npu_grouped_matmul_add_") == added
    assert (launched("stream_syncs") > 0) is (not SUMS_GROUPS and dtype is torch.float32)
    found = [leaf.grad for leaf in leaves]
    found = [found[0], torch.stack(found[1:5]), torch.stack(found[5:])] if listed else found
    for one, leaf in zip(found, exact):
        assert one.dtype is dtype
        assert_close(one, leaf.grad, ONE_ROUNDING[dtype])
    assert not found[1][1].any()  # an expert without rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_compiled_gradient_of_experts_weights_is_the_eager_one(kernels, dtype) -> None:
    moe, sizes = kernels["FusedMoE"], torch.tensor([3, 0, 5, 1]).npu()
    x, weight = (randn(*shape, dtype=dtype).npu() for shape in ((9, 24), (4, 24, 40)))
    grads = []
    for function in (moe.grouped_matmul, torch.compile(moe.grouped_matmul, backend="aot_eager", fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        function(x, leaf, sizes).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["rows and weights", "weights alone"])
def test_weights_of_another_dtype_than_the_rows_have_a_gradient(kernels, dtype) -> None:
    """DeepSeek-V3's router gives float32 weights to experts in bfloat16."""
    moe, index = kernels["FusedMoE"], torch.tensor([[1, 0], [2, 1], [1, 2]])
    x, weights, grad = randn(3, 16, dtype=dtype), randn(3, 2, seed=1), randn(3, 16, seed=2, dtype=dtype)
    stacked = randn(3, 16, 16, seed=3, dtype=dtype), randn(3, 16, 8, seed=4, dtype=dtype)
    results = []
    for device in ("npu", "cpu"):
        to = {"device": device} if device == "npu" else {"device": device, "dtype": torch.float64}
        leaves = [tensor.to(**to).requires_grad_() for tensor in (x, weights)]
        y = moe.fused_experts(leaves[0], index.to(device), leaves[1], *(tensor.to(**to) for tensor in stacked))
        given = grad.to(**to)
        softnpu.reset_counters()
        y.backward(given)
        fused = launched("npu_moe_token_unpermute_grad")
        results.append((leaves[0].grad, leaves[1].grad, fused))
    has_gradients = hasattr(torch.ops.npu, "npu_moe_token_unpermute_grad")
    assert results[0][2] == int(has_gradients and (dtype is torch.float32 or RELEASE >= (9, 0)))
    assert results[0][1].dtype is torch.float32
    steps = 6 * torch.finfo(dtype).eps  # a rounding of each tensor between experts and weights
    for one, expected in zip(results[0][:2], results[1][:2]):
        assert_close(one, expected, steps)


# ---- norms ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_with_a_weight_in_float32_is_as_exact_where_the_operator_takes_one_dtype(kernels, weight_dtype) -> None:
    norms = kernels["RMSNorm"]
    x, grad = randn(6, 256, dtype=torch.bfloat16), randn(6, 256, seed=1, dtype=torch.bfloat16)
    weight = randn(256, seed=2, dtype=weight_dtype)
    leaves, exact = ([fit(t).requires_grad_() for t in (x, weight)] for fit in (Tensor.npu, Tensor.double))
    softnpu.reset_counters()
    y = norms.rms_norm(leaves[0], leaves[1], 1e-6)
    y.backward(grad.npu())
    assert launched("npu_rms_norm") == launched("npu_rms_norm_backward") == 1
    expected = exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6) * exact[1]
    expected.backward(grad.double())
    for one, truth, dtype in zip(
        (y.detach(), *(t.grad for t in leaves)),
        (expected.detach(), *(t.grad for t in exact)),
        (x.dtype, x.dtype, weight_dtype),
    ):
        assert one.dtype is dtype
        assert_close(one, truth, ONE_ROUNDING[dtype])


def test_zero_centred_norms_train_on_every_release(kernels) -> None:
    norms = kernels["RMSNorm"]
    x, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((6, 256), (256,)))
    results = []
    for fit in (Tensor.npu, Tensor.double):
        leaves = [fit(tensor).requires_grad_() for tensor in (x, weight)]
        norms.zero_centered_rms_norm(*leaves, 1e-6).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for one, truth in zip(*results):
        assert_close(one, truth, ONE_ROUNDING[torch.bfloat16])
