"""Sparse attention of one layer, of the sizes that operators take: as near to float64 as what it replaces."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV32Config, DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swaps.attention import eligibility

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def module() -> DeepseekV32Attention:
    """An attention of the sizes that the operators take, in float64."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24}
    config = DeepseekV32Config(**sizes, qk_nope_head_dim=16, v_head_dim=16, index_n_heads=32, index_topk=16)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = DeepseekV32Attention(config, 0).double().requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1 if parameter.dim() == 1 else 0, 0.1)
    module.load_state_dict({name: value.bfloat16().double() for name, value in module.state_dict().items()})
    return module


def served(exact: DeepseekV32Attention, dtype: torch.dtype, implementation: str = "sdpa") -> DeepseekV32Attention:
    ours = copy.deepcopy(exact).to(dtype).npu()
    ours.config = ours.indexer.config = copy.deepcopy(exact.config)
    ours.config._attn_implementation = implementation
    return kernels_ext_npu.kernelize(torch.nn.ModuleDict({"attention": ours}))["attention"]


@pytest.mark.parametrize("operators", [True, False])
def test_chosen_keys_are_no_further_from_float64_than_all(module, chosen, monkeypatch, operators: bool) -> None:
    """In bfloat16, by operators and in torch, behind 44 keys and all of 48 at once; the same keys are chosen."""
    kernel = kernels_ext_npu.load("FlashAttention")
    if not operators:
        monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.limits"), "CANN", (8, 3))
    ours = served(module, torch.bfloat16, "npu_flash_attention")
    x, table = torch.randn(2, 48, 64).bfloat16(), torch.randn(2, 1, 48, 64).bfloat16()
    causal = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, 48, 48, dtype=torch.float64).masked_fill(~causal, -torch.inf)

    def both(each, x: Tensor, table: Tensor, masks) -> list[Tensor]:
        cache = DynamicCache(config=each.config)
        at_once = each(x, tuple(table), masks(0, 48))[0]
        each(x[:, :44], tuple(table[:, :, :44]), masks(0, 44), past_key_values=cache)
        return [at_once.cpu(), each(x[:, 44:], tuple(table[:, :, 44:]), masks(44, 48), past_key_values=cache)[0].cpu()]

    def described(begin: int, end: int):
        return kernel.attention_mask(2, end - begin, end, q_offset=begin, device="npu", allow_is_causal_skip=False)

    found: list[Tensor] = []
    hook = ours.indexer.register_forward_hook(lambda *called: found.append(called[-1].cpu().long()))
    with torch.no_grad():
        with Cost() as cost:
            few = both(ours, x.npu(), table.npu(), described)
        mine = found.copy()
        found.clear()
        for each in (ours, ours.indexer):  # norms and rotations stay: other roundings of theirs choose other keys
            setattr(each, eligibility.KERNEL_DISABLED, True)
        ours.config._attn_implementation = "sdpa"
        many = both(ours, x.npu(), table.npu(), lambda begin, end: causal[..., begin:end, :end].npu())
        hook.remove()
        keys = iter(found)
        monkeypatch.setattr(module.indexer, "forward", lambda *_, **__: next(keys))
        truth = both(module, x.double(), table.double(), lambda begin, end: added[..., begin:end, :end])
    for ours_found, theirs, rows in zip(mine, found, (slice(15, 48), slice(15, 44), slice(0, 4))):
        assert torch.equal(ours_found[:, rows].sort(-1).values, theirs[:, rows].sort(-1).values)
    assert 4 in chosen
    for operator in ("npu_lightning_indexer", "npu_sparse_flash_attention"):
        assert bool(cost.launches[operator]) == operators
    for of_chosen, of_all, wanted in zip(few, many, truth):
        errors = [(each.double() - wanted).norm() for each in (of_chosen, of_all)]
        assert errors[0] <= errors[1] <= 0.1 * wanted.norm()


def test_autocast_is_as_near_to_float64_as_expanded_keys(module, chosen, always) -> None:
    """A layer with float32 weights is trained, with the same keys for all.

    Absorbed queries and sums of latents are rounded where keys and values are elsewhere: 1.03 times as far.
    """
    kernel = kernels_ext_npu.load("FlashAttention")
    x, table, weights = torch.randn(2, 48, 64), torch.randn(2, 1, 48, 64), torch.randn(2, 48, 64)
    causal = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]
    keys = torch.rand(2, 48, 48).masked_fill(~causal[0], -1).topk(16).indices.int()

    def trained(each: DeepseekV32Attention, mask) -> tuple[Tensor, Tensor]:
        """The result, and the gradients of the input and of all that have one, behind each other."""
        parameters = each.requires_grad_().parameters
        like = next(parameters())
        each.indexer.forward = lambda *_, **__: keys.to(like.device)
        given = x.to(like).requires_grad_()
        with torch.autocast(like.device.type, torch.bfloat16, enabled=like.device.type == "npu"):
            out = each(given, tuple(table.to(like)), mask)[0]
        (out.to(like.dtype) * weights.to(like)).sum().backward()
        gradients = [given.grad, *(p.grad for p in parameters() if p.grad is not None)]
        return out.detach().cpu().double(), torch.cat([gradient.cpu().double().flatten() for gradient in gradients])

    ours, plain = served(module, torch.float32), served(module, torch.float32)
    setattr(plain, eligibility.KERNEL_DISABLED, True)
    exact = trained(module, torch.zeros(1, 1, 48, 48, dtype=torch.float64).masked_fill(~causal, -torch.inf))
    few = trained(ours, kernel.attention_mask(2, 48, 48, device="npu", allow_is_causal_skip=False))
    assert chosen == [48]
    all_keys = trained(plain, causal.npu())
    assert chosen == [48]
    for found, other, wanted in zip(few, all_keys, exact):
        assert (found - wanted).norm() <= 1.1 * (other - wanted).norm() <= 0.1 * wanted.norm()


def test_under_autocast_keys_are_chosen_no_worse_than_by_the_class_itself(module) -> None:
    """By what chosen keys score in float64 in all: transformers rounds scores to bfloat16."""
    x, residual, table = torch.randn(2, 48, 64), torch.randn(2, 48, 24), torch.randn(2, 1, 48, 64)
    seen = torch.ones(48, 48, dtype=torch.bool).tril().expand(2, -1, -1)
    ours = served(module, torch.float32)
    with torch.autocast("npu", torch.bfloat16):
        given = x.npu(), residual.npu(), tuple(table.npu()), seen.npu(), None
        mine = ours.indexer(*given).cpu().long()
        setattr(ours.indexer, eligibility.KERNEL_DISABLED, True)
        theirs = ours.indexer(*given).cpu().long()
    scores = []
    module.indexer.index_topk = 1
    original = Tensor.topk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", lambda self, *a, **k: scores.append(self) or original(self, *a, **k))
        module.indexer(x.double(), residual.double(), tuple(table.double()), seen, None)
    rows = slice(16, None)  # those before see no more keys than are chosen
    found, expected = (scores[0].gather(-1, chosen)[:, rows].sum() for chosen in (mine, theirs))
    assert found >= expected
