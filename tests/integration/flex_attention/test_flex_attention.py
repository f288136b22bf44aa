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
from kernels_ext_npu.flex_attention import block_masks
from kernels_ext_npu.measuring.costs import Cost
from tests.support import npu_counts, pages, zoo
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
    monkeypatch.setattr(block_masks, "at_indices", lambda *given: sizes.append(read(*given).shape[2]) or read(*given))
    for _ in range(3):
        found = flex_attention(*(tensor.npu() for tensor in given), block_mask=mask, enable_gqa=True)
    assert_near(found, expected.float())
    assert max(sizes) == 7
    assert sum(sizes) == TOKENS * (1 if name in DESCRIBED else 2)


@pytest.mark.parametrize("name", ["causal documents", "a window on both sides", "a scale", "a mask"])
def test_functions_are_run_once_and_a_later_call_is_one_launch(registered, name) -> None:
    """Beside copies between layouts: of the result, and of a batch of documents."""
    ran: list[int] = []
    function = (masks("npu") | scores("npu"))[name]
    is_mask = name in DESCRIBED

    def counted(*given: Tensor) -> Tensor:
        ran.append(1)
        return function(*given)

    changed = lambda s, b, h, q, k: counted(s, b, h, q, k)  # noqa: E731
    seen = lambda b, h, q, k: counted(b, h, q, k)  # noqa: E731
    options = {"block_mask": block_mask(seen, "npu")} if is_mask else {"score_mod": changed}
    given = [tensor.npu() for tensor in tensors()]
    flex_attention(*given, **options, enable_gqa=True)
    assert ran
    ran.clear()
    with Cost() as cost:
        flex_attention(*given, **options, enable_gqa=True)
    assert not ran
    assert cost.launches[ATTENTION] == 1
    assert set(cost.launches) <= {ATTENTION, "clone"}


def test_a_function_is_run_again_where_what_it_reads_has_changed(registered, plain) -> None:
    """A tensor that was written to, one that is no more, and the function of a mask itself."""
    given, on_device = tensors(), [tensor.npu() for tensor in tensors()]
    first = {device: torch.zeros(TOKENS, dtype=torch.long, device=device) for device in ("cpu", "npu")}
    factor = {device: torch.tensor(0.5, device=device) for device in ("cpu", "npu")}
    make = lambda device: (  # noqa: E731
        lambda s, b, h, q, k: s * factor[device],
        block_mask(lambda b, h, q, k: first[device][q] <= k, device),
    )
    both = {device: make(device) for device in ("cpu", "npu")}

    def assert_as_on_the_cpu() -> None:
        # of blocks that count: those of the first time, which were all
        found = flex_attention(*on_device, *both["npu"], enable_gqa=True)
        assert_near(found, plain(*given, score_mod=both["cpu"][0], block_mask=both["cpu"][1]).float())

    assert_as_on_the_cpu()
    for device in both:
        first[device][50:] = 40
        factor[device].fill_(2.0)
    assert_as_on_the_cpu()
    for device in both:
        first[device] = torch.full((TOKENS,), 7, device=device)
        factor[device] = torch.tensor(-1.0, device=device)
    assert_as_on_the_cpu()
    for device in both:
        both[device][1].mask_mod = masks(device)["causal"]
    assert_as_on_the_cpu()


def test_what_is_learned_has_a_gradient_after_a_call_without_one(registered) -> None:
    given, factor = [tensor.npu() for tensor in tensors()], torch.tensor(0.5, device="npu", requires_grad=True)
    function = lambda s, b, h, q, k: s * factor  # noqa: E731
    with torch.no_grad():
        expected = flex_attention(*given, function, enable_gqa=True)
    found = flex_attention(*given, function, enable_gqa=True)
    assert_near(found, expected.cpu())
    found.sum().backward()
    assert factor.grad.abs() > 1e-3


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


@pytest.mark.parametrize("name", ["causal documents", "a window on both sides", "prefixes", "queries that see nothing"])
def test_gradients_of_the_kernel_are_those_of_the_formula(registered, name) -> None:
    leaves = [each.requires_grad_() for each in tensors()]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    query, key, value = exact[0], *(each.repeat_interleave(2, dim=1) for each in exact[1:])
    sizes = 2, HEADS, TOKENS, TOKENS
    seen = masks("cpu")[name](
        *(torch.arange(n).view(*(-1 if i == d else 1 for d in range(4))) for i, n in enumerate(sizes))
    )
    scores = (query @ key.mT / 4).masked_fill(~seen, -1e300)
    (scores.softmax(-1).masked_fill(~seen, 0.0) @ value).sin().sum().backward()
    mask = block_mask(masks("npu")[name], "npu")
    npu_counts.reset()
    flex_attention(*(leaf.npu() for leaf in leaves), block_mask=mask, enable_gqa=True).sin().sum().backward()
    assert npu_counts.read()[ATTENTION] == npu_counts.read()["npu_fusion_attention_grad_v3"] == 1
    for leaf, other in zip(leaves, exact):
        assert_each_near(leaf.grad, other.grad.float(), 2e-5)  # sums of up to 800 terms in float32


def test_a_query_of_scores_that_sees_nothing_gives_zero_and_values_have_their_own_size(registered, plain) -> None:
    query, key, value = tensors()
    given = query, key, torch.cat([value, value.flip(2)], dim=-1)
    function = lambda s, b, h, q, k: torch.where((q >= k) & (q > 3), 2 * torch.tanh(s) + 0.01 * k, -math.inf)  # noqa: E731
    found = flex_attention(*(each.npu() for each in given), function, enable_gqa=True)
    assert_near(found, plain(*given, score_mod=function).float())
    assert not found[:, :, :4].any()


def test_a_compiled_module_that_makes_its_functions_computes_as_before(registered) -> None:
    """Its parameter, which the function reads, has the same gradient."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.linspace(-1, 1, 2 * TOKENS))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device=query.device)
            biased = lambda s, b, h, q, k: s + self.bias[q - k + TOKENS]  # noqa: E731
            return 2 * flex_attention(2 * query, key, value, biased, mask, enable_gqa=True)

    found = []
    for compiled in (False, True):
        module = Attention().npu()
        run = torch.compile(module, backend="eager") if compiled else module
        result = run(*(tensor.npu() for tensor in tensors()))
        result.sin().sum().backward()
        found.append((result.detach().cpu(), module.bias.grad.cpu()))
    assert_near(found[1][0], found[0][0])
    assert found[0][1].abs().max() > 0.1
    assert_near(found[1][1], found[0][1])


def test_a_compiled_function_and_other_devices_compute_as_before(registered, plain) -> None:
    given = tensors()
    expected = plain(*given, block_mask=block_mask(masks("cpu")["causal"], "cpu"))
    compiled = torch.compile(flex_attention, backend="eager")
    found = compiled(*(each.npu() for each in given), None, block_mask(masks("npu")["causal"], "npu"), enable_gqa=True)
    assert_near(found, expected.float())
    on_cpu = flex_attention(*given, block_mask=block_mask(masks("cpu")["causal"], "cpu"), enable_gqa=True)
    assert_near(on_cpu, expected.float())


def test_the_recipe_computes_attention_within_documents(registered) -> None:
    found: dict[str, Any] = {}
    npu_counts.reset()
    exec(pages.read(pages.DOCS / "recipes.md").code("flex_attention"), found)
    assert npu_counts.read()[ATTENTION] == 1
    query, key, value = (found[name].cpu().float() for name in ("query", "key", "value"))
    places = torch.arange(1024)
    seen = (places[:, None] // 128 == places // 128) & (places[:, None] >= places)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, seen)
    assert_each_near(found["output"].float(), expected, 2**-8)  # rounded to bfloat16, weights too
    described = block_masks.describe_block_mask(found["mask"])
    assert described.structure.sequence_ids is not None


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
    "a scale in one place": lambda s, b, h, q, k: torch.where((q == 71) & (k == 33), 2 * s, s),
    "a scale of some": lambda s, b, h, q, k: torch.where(q >= k, s, s / 2),
    "a bias that is capped": lambda s, b, h, q, k: 3 * torch.tanh((s + 0.01 * q) / 3),
    "another cap": lambda s, b, h, q, k: torch.clamp(s, -3, 3),
    "no number": lambda s, b, h, q, k: s.log(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_of_scores_are_refused(registered, name) -> None:
    given = [tensor.npu() for tensor in tensors()]
    with pytest.raises(ValueError, match=r"flex_attention: .* this one does more: flex_attention.__wrapped__ is"):
        flex_attention(*given, REFUSED[name], enable_gqa=True)


def test_a_cap_that_is_learned_heads_sizes_and_normalisers_are_refused(registered) -> None:
    query, key, value = (tensor.npu() for tensor in tensors())
    cap = torch.tensor(3.0, device="npu", requires_grad=True)
    with pytest.raises(ValueError, match="may learn nothing beside a cap: flex_attention"):
        flex_attention(query, key, value, lambda s, b, h, q, k: cap * torch.tanh(s / cap), enable_gqa=True)
    with pytest.raises(ValueError, match="4 heads of query and 2 of key need enable_gqa=True"):
        flex_attention(query, key, value)
    mask = block_mask(masks("npu")["causal"], "npu", queries=100)
    with pytest.raises(ValueError, match="block_mask is for 100 queries and 200 keys, got 200 and 200"):
        flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    for option in ({"return_lse": True}, {"return_aux": AuxRequest(lse=True)}):
        with pytest.raises(ValueError, match="return_lse and return_aux are not supported: flex_attention"):
            flex_attention(query, key, value, enable_gqa=True, **option)


def test_what_is_refused_is_left_to_torchs_own_as_the_sentence_says(registered) -> None:
    """It has a result and a normaliser on an NPU where it is not compiled."""
    query, key, value = (tensor.npu() for tensor in tensors())
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    square = REFUSED["a square"]
    found, lse = torch_flex_attention.flex_attention.__wrapped__(query, key, value, square, return_lse=True)
    scores = (query.cpu().double() @ key.cpu().double().mT / 4) ** 2
    assert_near(lse, scores.logsumexp(-1).float())
    assert_near(found, (scores.softmax(-1) @ value.cpu().double()).float())


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
