"""Blocks with a list of experts: the values and all gradients of the references, and how many launches they take."""

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from kernels_ext_npu.selftest.layers.moe_blocks_v4 import MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock
from tests.fused_moe.expert_modules import HIDDEN, block, block_inputs
from tests.fused_moe.list_blocks import assert_close, bound, decided, double, each_block, error, packed_or_not, results
from tests.support import npu_counts

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "packed"),
    [(8, 2, 10, False), (8, 1, 10, True), (4, 4, 10, True), (8, 2, 1, True), (130, 3, 40, True), (130, 3, 40, False)],
)
@each_block
def test_float32_values_and_gradients_are_the_originals(
    kernel: ModuleType, cls, experts, top_k, tokens, packed
) -> None:
    original = block(cls, experts, top_k)
    module = bound(kernel, original, packed)
    moved = block_inputs(tokens).npu()
    npu_counts.reset()
    found = results(module, moved)
    assert npu_counts.read()["stream_syncs"] == 0
    assert_close(found, results(original, block_inputs(tokens)))


@packed_or_not
@pytest.mark.parametrize("experts", [8, *(pytest.param(n, marks=pytest.mark.long) for n in (130, 260))])
@each_block
def test_bfloat16_is_no_further_from_float64_than_the_original(kernel: ModuleType, cls, experts, packed) -> None:
    """In root mean square over the result and all gradients: single ones are too small to compare roundings by.

    With two products what lies between them is rounded as often as in the original, so that chance decides: 5%.
    """
    original = block(cls, experts, 2).to(torch.bfloat16)
    # tokens in step with experts: with one or none for an expert chance decides
    x = decided(original, block_inputs(8 * experts, torch.bfloat16), 3 * experts)
    truth = results(double(original), x.double())
    own = results(original, x)
    module, moved = bound(kernel, original, packed), x.npu()
    npu_counts.reset()
    found = results(module, moved)
    assert npu_counts.read()["stream_syncs"] == 0
    assert [a.dtype for a in found if a is not None][:3] == [b.dtype for b in own if b is not None][:3]
    assert error(found, truth) <= error(own, truth) * (1 if packed else 1.05)


@packed_or_not
def test_weights_that_move_between_forward_and_backward(kernel: ModuleType, packed) -> None:
    """As into a flat buffer, where gate and up no longer lie side by side."""
    original = block(Qwen3MoeSparseMoeBlock)
    module, x = bound(kernel, original, packed), block_inputs().npu()
    leaf, on_cpu = x.clone().requires_grad_(), block_inputs().requires_grad_()
    y, expected = module(leaf)[0], original(on_cpu)[0]
    for parameter in module.parameters():
        parameter.data = parameter.detach().clone()
    y.square().sum().backward()
    expected.square().sum().backward()
    assert_close([leaf.grad], [on_cpu.grad])
    assert_close([p.grad for p in module.parameters()], [p.grad for p in original.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@packed_or_not
@each_block
def test_launches_do_not_depend_on_the_number_of_experts(kernel: ModuleType, cls, packed, dtype) -> None:
    counts = []
    for experts in (4, 16):
        module, x = bound(kernel, block(cls, experts).to(dtype), packed), block_inputs(12, dtype).npu()
        npu_counts.reset()
        results(module, x)
        counts.append({k: v for k, v in npu_counts.read().items() if v})
        for ignored in ("zero_", "fill_", "detach", "clone"):  # of the test and of autograd
            counts[-1].pop(ignored, None)
    assert counts[0] == counts[1]
    assert counts[0]["npu_grouped_matmul"] == (6 if packed else 9)
    assert counts[0].get("npu_swiglu", 0) == counts[0].get("npu_swiglu_backward", 0) == int(packed)
    assert ("cat" in counts[0] or "stack" in counts[0]) == (dtype is torch.float32)


def test_other_activations_are_computed_as_they_are(kernel: ModuleType, npu_counters) -> None:
    original = block(Qwen3MoeSparseMoeBlock)
    for expert in original.experts:
        expert.act_fn = nn.GELU()
    found = results(bound(kernel, original), block_inputs().npu())
    assert "npu_swiglu" not in npu_counters()
    assert npu_counters()["npu_grouped_matmul"] > 0
    assert_close(found, results(original, block_inputs()))


@packed_or_not
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("down_proj",), ("up_proj",)])
def test_biases_have_gradients_too(kernel: ModuleType, names, packed) -> None:
    original = block(Qwen3MoeSparseMoeBlock)
    for expert in original.experts:
        for name in names:
            linear = getattr(expert, name)
            linear.bias = nn.Parameter(torch.randn(linear.out_features))
    if len(names) == 1:
        packed = False
    assert_close(results(bound(kernel, original, packed), block_inputs().npu()), results(original, block_inputs()))


def test_noise_in_training_is_the_originals(kernel: ModuleType) -> None:
    """The generators of the CPU and of the device differ, so both get the same numbers."""
    original = block(MixtralSparseMoeBlock)
    original.jitter_noise = 0.1
    module = bound(kernel, original)
    for training in (True, False):
        original.train(training)
        module.train(training)
        x = block_inputs()
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "uniform_", lambda x, low, high: x.copy_(torch.linspace(low, high, HIDDEN)))
            a, b = x.npu(), x.clone()
            assert_close(list(module(a)), list(original(b)))
            assert torch.equal(a.cpu(), b)
            assert torch.equal(b, x) != training


def test_training_keeps_the_product_and_the_results_of_experts(kernel: ModuleType) -> None:
    """Beside what it is given, of the size of tokens times choices: ``[20, 2·I]`` and ``[20, H]``."""
    module, leaf = bound(kernel, block(Qwen3MoeSparseMoeBlock)), block_inputs(10).npu().requires_grad_()
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        module(leaf)
    assert sorted(list(t.shape) for t in held if t.shape[:1] == (20,) and t.dim() == 2) == [
        [20, HIDDEN],
        [20, 2 * HIDDEN],
    ]
