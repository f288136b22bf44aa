"""Sparse attention: which keys indexers choose, attention to these alone, and what it costs at published sizes."""

from __future__ import annotations

import copy
import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import DeepseekV32Config, DynamicCache, PreTrainedModel, StaticCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32Indexer

import kernels_ext_npu
from kernels_ext_npu.catalogue import INDEXERS
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.matching.indexer_scan import chooser, hands_on_indices
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.roofline import SOCS
from kernels_ext_npu.swaps.attention import indexers, latents, serving
from tests.support import zoo
from tests.support.agreement import TOLERANCE
from tests.support.counted import counted
from tests.support.decoding_steps import KEYS, steps

pytestmark = pytest.mark.usefixtures("registered")
SHARED = {"indexer_types": ["full", "shared"]}  # the second layer attends to what the first one chose
OTHERS = SHARED | {"kv_source_layers": [0, 0], "no_rope_layers": [1, 1]}
MODELS = {
    "AXK2ForCausalLM": {},
    "DeepseekV32ForCausalLM": {},
    "GlmMoeDsaForCausalLM": SHARED,
    "HYV4ForCausalLM": SHARED,
    "MistralLarge4ForConditionalGeneration": {"text_config": zoo.MHA | SHARED},
    "MistralLarge4ForConditionalGeneration, keys of another layer": {"text_config": zoo.MHA | OTHERS},
}
TOKENS = 2**15


def made(name: str, **sizes: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny model with all its weights drawn, and the same on the NPU with kernels."""
    file = next(m for m in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4") if _is_in(m, name))
    cls = getattr(import_module(f"transformers.models.{file}.modeling_{file}"), name.partition(",")[0])
    model = cls._from_config(zoo.configure(cls.config_class, zoo.MHA | MODELS[name] | sizes, zoo.SMALL)).eval()
    zoo.randomise(model, 0)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu"))
    model.set_attn_implementation("eager")
    return model, ours


def _is_in(file: str, name: str) -> bool:
    return name.lower().startswith(file.replace("_", ""))


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert (found.cpu() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.fixture
def chosen(monkeypatch) -> list[int]:
    """The numbers of queries of each attention to chosen keys."""
    queries: list[int] = []
    attend = latents.Latents.attend_chosen

    def noted(self, call, query: Tensor, *rest) -> Tensor:
        queries.append(query.shape[2])
        return attend(self, call, query, *rest)

    monkeypatch.setattr(latents.Latents, "attend_chosen", noted)
    return queries


@pytest.fixture
def always(monkeypatch) -> None:
    """Attend to chosen keys wherever there are more."""
    monkeypatch.setattr(
        latents.Latents, "is_cheaper_of_chosen", lambda self, queries, count, gathered: count < self.nope.shape[2]
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", ["by count", "always"])
def test_prompts_and_tokens_are_those_of_the_model_itself(request, chosen, name: str, rule: str) -> None:
    if rule == "always":
        request.getfixturevalue("always")
    model, ours = made(name)
    pairs = zip(steps(model, DynamicCache(config=model.config)), steps(ours, DynamicCache(config=ours.config)))
    for expected, found in pairs:
        assert_alike(found, expected)
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
    assert_alike(found[1], found[0])
    assert set(chosen) == {12}
    expected, got = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in models)
    assert expected.keys() == got.keys()
    assert not any(".indexer." in name for name in got)
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for each, gradient in expected.items():
        assert (got[each].cpu() - gradient).norm() <= TOLERANCE * whole


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"])
def test_long_prompts_in_parts_are_those_at_once(monkeypatch, chosen, always, name: str) -> None:
    model, ours = made(name, index_n_heads=16)  # with few heads scores are zero, and equal
    expected = steps(model, DynamicCache(config=model.config))
    monkeypatch.setattr(indexers, "_LONG", 8)
    monkeypatch.setattr(indexers, "_AT_A_TIME", 3)
    for wanted, found in zip(expected, steps(ours, DynamicCache(config=ours.config))):
        assert_alike(found, wanted)
    assert {2, 3} <= set(chosen)  # of 14
    assert 14 not in chosen
    ids = torch.randint(2, 90, (2, 12))
    with torch.no_grad():
        assert_alike(ours(ids.npu(), use_cache=False).logits, model(ids, use_cache=False).logits)
        chosen.clear()
        ours.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)  # sees whole prompts
        ours(ids.npu())
    assert 12 in chosen


def test_static_caches_packed_sequences_and_masks_of_the_caller(always, chosen) -> None:
    model, ours = made("DeepseekV32ForCausalLM")
    caches = [StaticCache(config=each.config, max_cache_len=KEYS) for each in (model, ours)]
    for expected, found in zip(*map(steps, (model, ours), caches)):
        assert_alike(found, expected)
    ids = torch.randint(2, 90, (1, 14))
    places = torch.cat((torch.arange(5), torch.arange(9))).unsqueeze(0)
    own = torch.rand(1, 1, 14, 14, generator=torch.Generator().manual_seed(0)) < 0.5
    own |= torch.eye(14, dtype=torch.bool)
    with torch.no_grad():
        for inputs in ({"position_ids": places}, {"attention_mask": torch.where(own, 0.0, -1e30)}):
            moved = {key: value.npu() for key, value in inputs.items()}
            found, expected = ours(ids.npu(), use_cache=False, **moved), model(ids, use_cache=False, **inputs)
            assert_alike(found.logits, expected.logits)
    assert chosen.count(14) == 6


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
                assert_alike(weights, truth)


def test_an_indexer_alone_chooses_the_keys_of_its_class() -> None:
    """With the mask of its queries as its class takes it, and of a cache; the order is that of the scores."""
    model, ours = made("DeepseekV32ForCausalLM")
    theirs, mine = (each.model.layers[0].self_attn.indexer for each in (model, ours))
    assert isinstance(mine, DeepseekV32Indexer)
    x, residual, table = torch.randn(2, 12, 64), torch.randn(2, 12, 24), torch.randn(2, 1, 12, 8)
    seen = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, -1, -1)
    expected = theirs(x, residual, tuple(table), seen, None)
    found = mine(x.npu(), residual.npu(), tuple(table.npu()), seen.npu(), None)
    assert found.dtype == expected.dtype == torch.int32
    rows = slice(3, None)  # those before see no four keys
    assert torch.equal(found.cpu()[:, rows], expected[:, rows])


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


def in_bfloat16(exact: DeepseekV32Attention, kernel: ModuleType) -> DeepseekV32Attention:
    ours = copy.deepcopy(exact).bfloat16().npu()
    ours.config = ours.indexer.config = copy.deepcopy(exact.config)
    ours.config._attn_implementation = "npu_flash_attention"
    return kernels_ext_npu.kernelize(torch.nn.ModuleDict({"attention": ours}))["attention"]


@pytest.mark.parametrize("operators", [True, False])
def test_chosen_keys_are_no_further_from_float64_than_all(module, chosen, monkeypatch, operators: bool) -> None:
    """In bfloat16, by operators and in torch, behind 44 keys and all of 48 at once; the same keys are chosen."""
    kernel = kernels_ext_npu.load("FlashAttention")
    if not operators:
        monkeypatch.setattr(import_module(f"{kernel.__name__}.limits"), "CANN", (8, 3))
    ours = in_bfloat16(module, kernel)
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
            setattr(each, serving.PLAIN, True)
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


def test_what_is_restored_computes_all_scores_and_the_report_says_so(chosen) -> None:
    model, ours = made("DeepseekV32ForCausalLM")

    def rows() -> list:
        return [row for row in kernels_ext_npu.report(ours) if row.kind == INDEXERS.in_models]

    assert [(row.swapped, row.reason) for row in rows()] == [(True, None)] * 2
    kernels_ext_npu.restore(ours)
    assert [row.swapped for row in rows()] == [False] * 2
    with Cost() as cost:
        for expected, found in zip(*(steps(each, DynamicCache(config=each.config)) for each in (model, ours))):
            assert_alike(found, expected)
    assert not chosen
    assert cost.launches["scatter"] or cost.launches["scatter_"]  # a mask of what was chosen


# ---- counted ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operators", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_layer_of_deepseek_v32_at_32k_tokens(monkeypatch, operators: bool) -> None:
    """A prompt holds less than 3 GB beyond its inputs; by operators a token moves weights, index keys, latents."""
    config = DeepseekV32Config()
    config._attn_implementation = "sdpa"
    kernel = kernels_ext_npu.load("FlashAttention")
    if not operators:
        monkeypatch.setattr(import_module(f"{kernel.__name__}.limits"), "CANN", (8, 3))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer = fake_attention(config)
        kernels_ext_npu.kernelize(torch.nn.ModuleDict({"attention": layer}))
        x = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, device="npu")
        table = torch.zeros(1, TOKENS, config.qk_rope_head_dim, dtype=torch.bfloat16, device="npu")
        cache = DynamicCache(config=config)

        def mask(queries: int, keys: int):
            offset = keys - queries
            return kernel.attention_mask(1, queries, keys, q_offset=offset, device="npu", allow_is_causal_skip=False)

        counting = Counting(KnownValues(), SOCS["910b"], None)
        counting.memory.exclude([x, table, *layer.parameters()])
        with counting:
            layer(x, (table, table), mask(TOKENS, TOKENS), past_key_values=cache)
        counts = counting.counts()
        assert counts.waits == 0
        assert counts.peak <= 3e9
        with Cost() as cost:
            layer(x[:, :1], (table[:, :1],) * 2, mask(1, TOKENS + 1), past_key_values=cache)
    weights = sum(parameter.nbytes for parameter in layer.parameters())
    index_keys, latents_read = TOKENS * 128 * 2, 2048 * 576 * 2
    moved = cost.bytes.total() - weights - cost.bytes["cat"]  # what a growing cache is made anew of
    assert moved <= 1.3 * (index_keys + latents_read) or not operators


def fake_attention(config: DeepseekV32Config) -> DeepseekV32Attention:
    """Make an attention in bfloat16 on the NPU, inside a FakeTensorMode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("npu"):
            return DeepseekV32Attention(config, 0).eval()
    finally:
        torch.set_default_dtype(before)


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
    assert [len(classes) for classes in found.values()] == [5, 5]
    assert all(map(chooser, found["indexer"]))
    assert all(map(hands_on_indices, found["attention"]))
