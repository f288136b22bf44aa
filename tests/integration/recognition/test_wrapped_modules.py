"""Other libraries wrap modules that were recognised, or are to be: accelerate their forwards, FSDP2 their classes."""

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.distributed.fsdp import fully_shard

import kernels_ext_npu
from kernels_ext_npu.swaps.decision import View
from tests.integration.recognition.blocks import launched
from tests.integration.recognition.spellings.other_peoples_models import StudentsLlama
from tests.integration.recognition.spellings.other_peoples_rotations import caller
from tests.support.served import rows

SWAPPED = {"RMSNorm": 5, "SwiGLUMLP": 2}
TOKENS = torch.arange(14).view(2, 7)


def swapped(model: nn.Module) -> Counter[str | None]:
    return Counter(row.kernel for row in rows(model) if row.swapped)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Compare results and gradients, of two blocks of sums of float32 in another order."""
    found, expected = model(TOKENS.npu()), plain(TOKENS)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    for module, result in ((model, found), (plain, expected)):
        module.zero_grad()
        result.square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        whole = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(whole.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    return StudentsLlama()


@pytest.mark.parametrize("is_first", [True, False])
def test_kernels_go_below_the_hooks_of_accelerate_and_out_again(registered, plain, is_first: bool) -> None:
    """As with a device_map of several devices, by which every module with weights moves what it is given."""
    model = copy.deepcopy(plain).to("npu")
    if is_first:
        kernels_ext_npu.kernelize(model)
    hooked = [module for module in model.modules() if [*module.parameters(recurse=False)]]
    for module in (*hooked, *(layer.feed_forward for layer in model.layers)):
        add_hook_to_module(module, AlignDevicesHook("npu:0"))
    for _ in range(2):
        kernels_ext_npu.kernelize(model)
        assert {layer: swapped(model)[layer] for layer in SWAPPED} == SWAPPED
        assert launched(lambda: model(TOKENS)) == sum(SWAPPED.values())  # from the CPU
        assert_same(model, plain)
    kernels_ext_npu.restore(model)
    assert not swapped(model)
    assert launched(lambda: model(TOKENS)) == 0
    assert all(hasattr(module, "_hf_hook") for module in hooked)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_first", [True, False])
def test_modules_that_are_sharded_by_themselves_keep_their_kernels(registered, one_rank, plain, is_first: bool) -> None:
    """As recipes do with the last norm: FSDP2 gives each such module a class of its own."""
    model = copy.deepcopy(plain).to("npu")
    if is_first:
        kernels_ext_npu.kernelize(model)
    for layer in model.layers:
        for part in (layer.attention_norm, layer.feed_forward, layer):
            fully_shard(part)
    fully_shard([model.norm, model.output])
    fully_shard(model)
    if not is_first:
        kernels_ext_npu.kernelize(model)
    assert {layer: swapped(model)[layer] for layer in SWAPPED} == SWAPPED
    assert launched(lambda: model(TOKENS.npu())) == sum(SWAPPED.values())
    assert_same(model, plain)


def test_a_class_that_is_seen_after_the_swap_of_a_function_calls_it_too(registered) -> None:
    """As the class that FSDP2 makes of one."""
    first, second = caller("apply_rope_kimi"), caller("apply_rope_kimi")
    kernels_ext_npu.kernelize(nn.ModuleList([first(), nn.Linear(1, 1)]).to("npu"))
    models = [nn.ModuleList([cls()]) for cls in (first, second)]
    calls = [list(View(model).callers) for model in models]
    assert len(calls[0]) == 1
    assert calls[0] == calls[1]
