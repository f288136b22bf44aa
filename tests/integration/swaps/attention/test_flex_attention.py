"""torch's ``flex_attention`` on the NPU: masks and scores by functions, called directly and by a name in models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex_attention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

import kernels_ext_npu
from kernels_ext_npu.swaps.attention import block_masks
from tests.support import npu_counts, zoo
from tests.support.attention_models import BATCHES, MODELS, build, ids, on_npu
from tests.support.launches import ATTENTION
from tests.support.nearness import assert_each_near

PLAIN = flex_attention
TOKENS, HEADS = 200, 4
DOCUMENTS = torch.tensor([0] * 50 + [1] * 30 + [2] * 120)
PREFIXES = torch.tensor([20, 60])
FLOAT32 = 5e-6  # of values of size one: float32 of scores of 200 keys, compared with float64
assert_near = partial(assert_each_near, tolerance=FLOAT32)

Masks = dict[str, Callable[..., Tensor]]


def masks(device: str) -> Masks:
    """Make functions of a batch index, head, query and key."""
    documents, prefixes = DOCUMENTS.to(device), PREFIXES.to(device)
    same = lambda q, k: documents[q] == documents[k]  # noqa: E731
    return {
        "causal": lambda b, h, q, k: q >= k,
        "a window": lambda b, h, q, k: (q >= k) & (q - k < 33),
        "a window on both sides": lambda b, h, q, k: (q - k).abs() <= 17,
        "documents": lambda b, h, q, k: same(q, k),
        "causal documents": lambda b, h, q, k: same(q, k) & (q >= k),
        "windows in documents": lambda b, h, q, k: same(q, k) & (q >= k) & (q - k < 20),
        "an uneven window": lambda b, h, q, k: (q - k <= 17) & (k - q <= 4),
        "prefixes": lambda b, h, q, k: (k < prefixes[b]) | (q >= k),
        "a head that sees all": lambda b, h, q, k: (q >= k) & ((q - k < 20) | (h == 0)),
        "queries that see nothing": lambda b, h, q, k: (q >= k) & (q >= 9),
        "holes": lambda b, h, q, k: (q - k) % 3 == 0,
    }


def scores(device: str) -> dict[str, Callable[..., Tensor]]:
    """Make functions of a score, and of a batch index, head, query and key."""
    by_distance = torch.linspace(-1, 1, 2 * TOKENS, device=device)
    documents = DOCUMENTS.to(device)
    return {
        "a scale": lambda s, b, h, q, k: s * 0.3,
        "a cap": lambda s, b, h, q, k: 3 * torch.tanh(s * 1.5 / 3),
        "ALiBi": lambda s, b, h, q, k: s - (h + 1) * 0.05 * (q - k),
        "a bias by distance": lambda s, b, h, q, k: s + by_distance[q - k + TOKENS],
        "a bias in one place": lambda s, b, h, q, k: torch.where((q == 71) & (k == 33), s + 4, s),
        "a cap and a bias": lambda s, b, h, q, k: 2 * torch.tanh(s / 2) + by_distance[q - k + TOKENS],
        "a mask": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
        "a mask, a scale and a bias": lambda s, b, h, q, k: torch.where(
            documents[q] == documents[k], 2 * s + 0.1 * h, -math.inf
        ),
    }


# those that need no mask tensor, with the band in a sequence, and whether there are sequences
DESCRIBED = {
    "causal": ((None, 0), False),
    "a window": ((32, 0), False),
    "a window on both sides": ((17, 17), False),
    "documents": ((None, None), True),
    "causal documents": ((None, 0), True),
    "windows in documents": ((19, 0), True),
}


def tensors(queries: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, queries, 16, generator=generator)
    return query, *torch.randn(2, 2, 2, TOKENS, 16, generator=generator)


def block_mask(function: Callable[..., Tensor], device: str, queries: int = TOKENS) -> BlockMask:
    return create_block_mask(function, 2, HEADS, queries, TOKENS, device=device)


@pytest.fixture
def plain(monkeypatch) -> Callable[..., Tensor]:
    """flex_attention of torch without kernels, in float64 on the CPU, without a compiler."""
    monkeypatch.setattr(torch_flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return lambda *given, **options: PLAIN(*(tensor.double() for tensor in given), enable_gqa=True, **options)


# ---- called directly -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", masks("cpu"))
def test_block_masks_are_masks_of_the_kernel(registered, plain, name) -> None:
    given = tensors()
    expected = plain(*given, block_mask=block_mask(masks("cpu")[name], "cpu"))
    mask = block_mask(masks("npu")[name], "npu")
    npu_counts.reset()
    found = flex_attention(*(tensor.npu() for tensor in given), block_mask=mask, enable_gqa=True)
    assert npu_counts.read()[ATTENTION] == 1
    assert_near(found, expected.float())
    described = block_masks.describe_block_mask(mask)
    assert isinstance(described, Tensor) == (name not in DESCRIBED)
    if name in DESCRIBED:
        structure = described.structure
        assert (structure.band[:2], structure.sequence_ids is not None) == DESCRIBED[name]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", scores("cpu"))
def test_scores_are_changed_as_the_function_says(registered, plain, name, masked) -> None:
    given, both = tensors(), {}
    for device in ("cpu", "npu"):
        both[device] = {"score_mod": scores(device)[name]}
        if masked:
            both[device]["block_mask"] = block_mask(masks(device)["causal"], device)
    expected = plain(*given, **both["cpu"], scale=0.5)
    found = flex_attention(*(tensor.npu() for tensor in given), **both["npu"], scale=0.5, enable_gqa=True)
    assert_near(found, expected.float())


@pytest.mark.parametrize("name", ["causal documents", "prefixes"])
def test_a_mask_is_read_in_parts_and_once(registered, plain, monkeypatch, name) -> None:
    """The parts are of few queries, where elements are few: no part holds the whole mask."""
    monkeypatch.setattr(block_masks, "_ELEMENTS", 2 * HEADS * TOKENS * 7)
    given, sizes = tensors(), []
    both = {device: masks(device)[name] for device in ("cpu", "npu")}
    expected = plain(*given, block_mask=block_mask(both["cpu"], "cpu"))
    mask, read = block_mask(both["npu"], "npu"), block_masks.at_indices
    monkeypatch.setattr(
        block_masks, "at_indices", lambda *read_of: sizes.append(read(*read_of).shape[2]) or read(*read_of)
    )
    for _ in range(3):
        found = flex_attention(*(tensor.npu() for tensor in given), block_mask=mask, enable_gqa=True)
    assert_near(found, expected.float())
    assert max(sizes) == 7
    assert sum(sizes) == TOKENS * (1 if name in DESCRIBED else 2)


def test_blocks_that_are_chosen_without_a_function_are_the_mask(registered) -> None:
    """As the blocks that a router chose; each query block of 32 sees its own and the first."""
    blocks = torch.tensor([[0] * 7, *([0, n, *[0] * 5] for n in range(1, 7))])[None, None]
    counts = torch.tensor([[[1, 2, 2, 2, 2, 2, 2]]])
    mask = BlockMask.from_kv_blocks(counts.int().npu(), blocks.int().npu(), BLOCK_SIZE=32, seq_lengths=(TOKENS, TOKENS))
    block = torch.arange(TOKENS) // 32
    seen = (block[:, None] == block) | (block == 0)
    query, key, value = tensors()
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    expected = nn.functional.scaled_dot_product_attention(query, key, value, seen)
    assert_near(flex_attention(query.npu(), key.npu(), value.npu(), block_mask=mask), expected)


@pytest.mark.parametrize("queries", [1, 7, 230])
def test_queries_may_be_fewer_or_more_than_keys(registered, plain, queries) -> None:
    given = tensors(queries)
    last = lambda b, h, q, k: q + TOKENS - queries >= k  # noqa: E731
    for function in (last, lambda b, h, q, k: q >= k):
        expected = plain(*given, block_mask=block_mask(function, "cpu", queries))
        mask = block_mask(function, "npu", queries)
        found = flex_attention(*(tensor.npu() for tensor in given), block_mask=mask, enable_gqa=True)
        assert_near(found, expected.float())


def test_gradients_reach_tensors_and_what_a_function_learns(registered) -> None:
    """Against the formula in float64: torch's own has no gradient on the CPU."""
    bias, factor = torch.randn(2 * TOKENS, generator=torch.Generator().manual_seed(1)), torch.tensor(0.7)
    leaves = [each.clone().requires_grad_() for each in (*tensors(), bias, factor)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    places = torch.arange(TOKENS)
    distance = places[:, None] - places
    query, key, value = exact[0], *(each.repeat_interleave(2, dim=1) for each in exact[1:3])
    seen = (DOCUMENTS[:, None] == DOCUMENTS) & (distance >= 0)
    weights = (query @ key.mT / 4 * exact[4] + exact[3][distance + TOKENS]).masked_fill(~seen, -math.inf).softmax(-1)
    expected = weights @ value
    expected.sin().sum().backward()
    query, key, value, bias, factor = (leaf.npu() for leaf in leaves)
    mask = block_mask(masks("npu")["causal documents"], "npu")
    found = flex_attention(
        *(query, key, value, lambda s, b, h, q, k: s * factor + bias[q - k + TOKENS], mask), enable_gqa=True
    )
    found.sin().sum().backward()
    assert_near(found, expected.float())
    for leaf, other in zip(leaves, exact):
        assert other.grad.abs().max() > 0.1
        assert_each_near(leaf.grad, other.grad.float(), 2e-5)  # sums of 320,000 terms in float32


def test_a_compiled_function_and_other_devices_compute_as_before(registered, plain) -> None:
    given = tensors()
    expected = plain(*given, block_mask=block_mask(masks("cpu")["causal"], "cpu"))
    compiled = torch.compile(flex_attention, backend="eager")
    found = compiled(*(each.npu() for each in given), None, block_mask(masks("npu")["causal"], "npu"), enable_gqa=True)
    assert_near(found, expected.float())
    on_cpu = flex_attention(*given, block_mask=block_mask(masks("cpu")["causal"], "cpu"), enable_gqa=True)
    assert_near(on_cpu, expected.float())


def test_unregister_puts_the_function_back_where_it_was() -> None:
    kernels_ext_npu.register()
    assert flex_attention is torch_flex_attention.flex_attention is not PLAIN
    kernels_ext_npu.unregister()
    assert flex_attention is torch_flex_attention.flex_attention is PLAIN
    assert AttentionInterface._global_mapping["flex_attention"] is flex_attention_forward


# ---- what is refused -------------------------------------------------------------------------------------------------
REFUSED = {
    "a square": lambda s, b, h, q, k: s * s,
    "a scale by position": lambda s, b, h, q, k: s * (1 + q / 100),
    "a scale of some": lambda s, b, h, q, k: torch.where(q >= k, s, s / 2),
    "another cap": lambda s, b, h, q, k: torch.clamp(s, -3, 3),
    "no number": lambda s, b, h, q, k: s.log(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_of_scores_are_refused(registered, name) -> None:
    given = [tensor.npu() for tensor in tensors()]
    with pytest.raises(ValueError, match=r"flex_attention: .* this one does more: compute scores with"):
        flex_attention(*given, REFUSED[name], enable_gqa=True)


def test_a_cap_that_is_learned_heads_and_normalisers_are_refused(registered) -> None:
    query, key, value = (tensor.npu() for tensor in tensors())
    cap = torch.tensor(3.0, device="npu", requires_grad=True)
    with pytest.raises(ValueError, match="may learn nothing beside a cap: compute scores with"):
        flex_attention(query, key, value, lambda s, b, h, q, k: cap * torch.tanh(s / cap), enable_gqa=True)
    with pytest.raises(ValueError, match="4 heads of query and 2 of key need enable_gqa=True"):
        flex_attention(query, key, value)
    for option in ({"return_lse": True}, {"return_aux": AuxRequest(lse=True)}):
        with pytest.raises(ValueError, match="return_lse and return_aux are not supported: compute scores with"):
            flex_attention(query, key, value, enable_gqa=True, **option)


# ---- in models -------------------------------------------------------------------------------------------------------
def named(name: str) -> tuple[nn.Module, nn.Module]:
    """Build a model twice: with eager attention on the CPU, and with flex_attention on the NPU."""
    plain = build(name)
    for parameter_name, parameter in plain.named_parameters():
        if "sinks" in parameter_name:
            nn.init.normal_(parameter, 1.0, 1.0)
    plain.set_attn_implementation("eager")
    model = copy.deepcopy(plain)
    model.set_attn_implementation("flex_attention")
    return plain, model.to("npu")


@pytest.mark.parametrize("batch", ["plain", "left padding", "right padding", "padding between", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_models_that_name_it_compute_what_eager_attention_does(registered, name, batch) -> None:
    plain, model = named(name)
    inputs = BATCHES[batch]()
    npu_counts.reset()
    found, expected = model(**on_npu(inputs)).logits, plain(**inputs).logits
    is_token = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert npu_counts.read().get(ATTENTION, 0) == (0 if name == "gemma2" else 2)  # its scores are capped
    assert_near(found[is_token.npu()], expected[is_token])
    rows = [row for row in kernels_ext_npu.report(model) if row.kind == "attention"]
    assert [row.swapped for row in rows] == [True] * 2


def test_biases_of_positions_are_added(registered) -> None:
    """T5's: with gradients."""
    plain = zoo.build("t5")
    plain.set_attn_implementation("eager")
    model = copy.deepcopy(plain)
    model.set_attn_implementation("flex_attention")
    model.to("npu")
    losses = [zoo.loss(each(**zoo.inputs("t5", each))) for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert_near(losses[1], losses[0])
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        if one.grad is not None:
            assert_near(other.grad, one.grad)


@pytest.mark.parametrize("name", ["causal", "causal documents", "holes"])
def test_a_block_mask_is_given_to_a_model(registered, name) -> None:
    plain, model = named("qwen3")
    documents = torch.tensor([0] * 5 + [1] * 12 + [2] * 7)
    functions = {
        "causal": lambda d, q, k: q >= k,
        "causal documents": lambda d, q, k: (d[q] == d[k]) & (q >= k),
        "holes": lambda d, q, k: (q - k) % 3 == 0,
    }
    places = torch.arange(24)
    seen = functions[name](documents, places[:, None], places)
    expected = plain(ids(2), attention_mask=torch.where(seen, 0.0, -math.inf).expand(2, 1, -1, -1)).logits
    on_device = documents.npu()
    mask = create_block_mask(lambda b, h, q, k: functions[name](on_device, q, k), None, None, 24, 24, device="npu")
    npu_counts.reset()
    assert_near(model(ids(2).npu(), attention_mask=mask).logits, expected)
    assert npu_counts.read()[ATTENTION] == 2


def test_a_model_generates_with_a_static_cache(registered) -> None:
    plain, model = named("mistral")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = plain.generate(ids(2), **options)
    assert torch.equal(model.generate(ids(2).npu(), **options).cpu(), expected)


def test_models_elsewhere_and_restored_ones_keep_torchs(registered, monkeypatch) -> None:
    """That is called without its compiler here, which has no NPU."""
    called: list[str] = []

    def eager(query: Tensor, key: Tensor, value: Tensor, training: bool, **options: Any) -> Any:
        called.append(query.device.type)
        return PLAIN(query, key, value, **options)

    monkeypatch.setattr(torch_flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", eager)
    make = lambda **given: create_block_mask(**given | {"_compile": False})  # noqa: E731
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", make)
    plain, model = named("qwen3")
    expected = plain(ids(1)).logits
    assert_near(model.cpu()(ids(1)).logits, expected)
    assert called == ["cpu"] * 2
    assert_near(model.npu()(ids(1).npu()).logits, expected)
    assert called == ["cpu"] * 2
    kernels_ext_npu.restore(model)
    assert_near(model(ids(1).npu()).logits, expected)
    assert called == ["cpu"] * 2 + ["npu"] * 2
    kernels_ext_npu.kernelize(model)
    assert_near(model(ids(1).npu()).logits, expected)
    assert called == ["cpu"] * 2 + ["npu"] * 2
