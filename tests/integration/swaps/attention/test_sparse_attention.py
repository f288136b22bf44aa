"""Sparse attention: which keys indexers choose, attention to these alone, and what it costs at published sizes."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import kernels_ext_npu
from kernels_ext_npu.catalogue import INDEXERS
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swaps.attention import indexers
from kernels_ext_npu.syntax.indexers import hands_on_indices, indexer_rewriter
from tests.integration.swaps.attention.decoding_steps import KEYS, assert_same_steps, steps
from tests.support.counted import counted
from tests.support.nearness import assert_gradients_near, assert_near, gradients
from tests.support.sparse_models import MODELS, made

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", ["by count", "always"])
def test_prompts_and_tokens_are_those_of_the_model_itself(request, chosen, name: str, rule: str) -> None:
    if rule == "always":
        request.getfixturevalue("always")
    model, ours = made(name)
    assert_same_steps(model, ours)
    assert ({1, 3} if rule == "by count" else {1, 3, 14}) <= set(chosen)


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_model_itself(chosen, always, name: str) -> None:
    """Gradients of latents are sums over all queries that chose them; indexers have none, here as there."""
    models = made(name)
    ids = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = []
    for model in models:
        logits = model.train()(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits[1]
        found.append(logits.detach())
        (logits * torch.arange(100, device=model.device).sin()).sum().backward()
    assert_near(found[1], found[0])
    assert set(chosen) == {12}
    expected, got = map(gradients, models)
    assert not any(".indexer." in name for name in got)
    assert_gradients_near(got, expected)


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"])
def test_long_prompts_in_parts_are_those_at_once(monkeypatch, chosen, always, name: str) -> None:
    model, ours = made(name, index_n_heads=16)  # with few heads scores are zero, and equal
    expected = steps(model, DynamicCache(config=model.config))
    monkeypatch.setattr(indexers, "_LONG", 8)
    monkeypatch.setattr(indexers, "_AT_A_TIME", 3)
    for wanted, found in zip(expected, steps(ours, DynamicCache(config=ours.config))):
        assert_near(found, wanted)
    assert {2, 3} <= set(chosen)  # of 14
    assert 14 not in chosen
    ids = torch.randint(2, 90, (2, 12))
    with torch.no_grad():
        assert_near(ours(ids.npu(), use_cache=False).logits, model(ids, use_cache=False).logits)
        chosen.clear()
        ours.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)  # sees whole prompts
        ours(ids.npu())
    assert 12 in chosen


def test_static_caches_packed_sequences_and_masks_of_the_caller(always, chosen) -> None:
    model, ours = made("DeepseekV32ForCausalLM")
    caches = [StaticCache(config=each.config, max_cache_len=KEYS) for each in (model, ours)]
    assert_same_steps(model, ours, caches)
    ids = torch.randint(2, 90, (1, 14))
    places = torch.cat((torch.arange(5), torch.arange(9))).unsqueeze(0)
    own = torch.rand(1, 1, 14, 14, generator=torch.Generator().manual_seed(0)) < 0.5
    own |= torch.eye(14, dtype=torch.bool)
    with torch.no_grad():
        for inputs in ({"position_ids": places}, {"attention_mask": torch.where(own, 0.0, -1e30)}):
            moved = {key: value.npu() for key, value in inputs.items()}
            found, expected = ours(ids.npu(), use_cache=False, **moved), model(ids, use_cache=False, **inputs)
            assert_near(found.logits, expected.logits)
    assert chosen.count(14) == 6


def test_a_compiled_model_is_one_graph_with_the_same_results(chosen) -> None:
    """Masks are what it has there; nothing of ours is asked."""
    model, ours = made("GlmMoeDsaForCausalLM", index_n_heads=16)
    ids = torch.randint(2, 90, (2, 12))
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_near(compiled(ids.npu(), use_cache=False).logits, model(ids, use_cache=False).logits)
    assert not chosen


def test_weights_that_are_asked_for_are_those_of_chosen_keys() -> None:
    for name in ("HYV4ForCausalLM", "DeepseekV32ForCausalLM"):
        model, ours = made(name)
        ids = torch.randint(2, 90, (2, 12))
        for implementation in ("sdpa", "npu_flash_attention"):
            ours.set_attn_implementation("eager" if implementation == "sdpa" else implementation)
            with torch.no_grad():
                found = ours(ids.npu(), output_attentions=True).attentions
                expected = model(ids, output_attentions=True).attentions
            for weights, truth in zip(found, expected):
                assert_near(weights, truth)


def test_what_is_restored_computes_all_scores_and_the_report_says_so(chosen) -> None:
    model, ours = made("DeepseekV32ForCausalLM")

    def rows() -> list:
        return [row for row in kernels_ext_npu.report(ours) if row.kind == INDEXERS.in_models]

    assert [(row.swapped, row.reason) for row in rows()] == [(True, None)] * 2
    kernels_ext_npu.restore(ours)
    assert [row.swapped for row in rows()] == [False] * 2
    with Cost() as cost:
        assert_same_steps(model, ours)
    assert not chosen
    assert cost.launches["scatter"] or cost.launches["scatter_"]  # a mask of what was chosen


@counted
def test_every_class_that_hands_on_indices_is_known() -> None:
    files = Path(transformers.__path__[0]).glob("models/*/modeling_*.py")
    found = {"indexer": set(), "attention": set()}
    for path in files:
        if "indices=sparse_indices" not in path.read_text():
            continue
        file = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for cls in vars(file).values():
            if isinstance(cls, type) and cls.__module__ == file.__name__ and "forward" in vars(cls):
                source = inspect.getsource(cls.forward)
                if "indices=sparse_indices" in source:
                    found["attention"].add(cls)
                if ".update_indexer(" in source:
                    found["indexer"].add(cls)
    assert [len(classes) for classes in found.values()] == [7, 7]
    assert all(map(indexer_rewriter, found["indexer"]))
    masked = {cls.__name__ for cls in found["attention"] if hands_on_indices(cls) is None}
    assert masked == {"Dots3NoteTextAttention"}  # in other words: its mask says what was chosen
