"""One query behind a cache of latents, whose rotated part lies apart: values against float64, launches, and copies."""

from __future__ import annotations

from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import softnpu
from tests.support import npu_counts

BATCH, KEYS = 2, 700  # more than one block of the operator's, which is 512 keys
LATENT, ROTATED = 512, 64
SCALE = 0.05
MODULE = SimpleNamespace(is_causal=True)
# weights and the result are rounded to the dtype, of which the errors of weights add up as what they weigh does
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OPERATOR = "npu_fused_infer_attention_score"


def drawn(heads: int, dtype: torch.dtype, queries: int = 1, keys: int = KEYS, size: int = LATENT) -> list[Tensor]:
    """Queries and keys, and the rotated parts of both."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, heads, queries), (BATCH, 1, keys))
    return [torch.randn(*shape, width, generator=generator).to(dtype) for width in (size, ROTATED) for shape in shapes]


def exact(query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, seen: Tensor | None = None) -> Tensor:
    """``[B, S_q, N, R]`` in float64, of the formula; a query that sees no key gives zeros."""
    query, key, query_rope, key_rope = (t.double() for t in (query, key, query_rope, key_rope))
    rows = [t.flatten(1, 2) for t in (query, query_rope)]  # heads read the same keys: as rows these are not copied
    scores = (rows[0] @ key[:, 0].mT + rows[1] @ key_rope[:, 0].mT).view(*query.shape[:3], -1) * SCALE
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights.flatten(1, 2) @ key[:, 0]).view(query.shape).transpose(1, 2)


def attended(kernel: ModuleType, tensors: list[Tensor], mask: Tensor | None = None, **options) -> Tensor:
    query, key, query_rope, key_rope = (t.npu() for t in tensors)
    npu_counts.reset()
    options = {"scaling": SCALE, "rotated": (query_rope, key_rope)} | options
    with torch.no_grad():
        return kernel.attention_forward(MODULE, query, key, key, mask, **options)[0]


def launched() -> set[str]:
    return npu_counts.read().keys() & {OPERATOR, "cat", "npu_fusion_attention", "npu_fusion_attention_v3", "clone"}


def masks(kernel: ModuleType) -> dict[str, tuple[object, Tensor | None]]:
    """Masks as the function takes them, and which keys each row sees."""
    seen = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    before, between, none = seen.clone(), seen.clone(), seen.clone()
    before[0, ..., :600] = False
    between[0, ..., 100:690] = False
    none[1] = False
    sizes = {"batch_size": BATCH, "q_length": 1, "kv_length": KEYS, "q_offset": KEYS - 1, "device": "npu"}
    static = seen.clone()
    static[..., 550:] = False  # room that a static cache has behind its tokens
    room = {**sizes, "q_offset": torch.tensor(549, device="npu")}
    return {
        "none": (None, None),
        "causal": (kernel.attention_mask(**sizes), None),
        "padding before": (kernel.attention_mask(**sizes, attention_mask=before[:, 0, 0].npu()), before),
        "a static cache": (kernel.attention_mask(**room), static),
        "of the caller": (between.npu(), between),
        "of all rows": (between[:1].npu(), between[:1]),
        "a row without keys": (none.npu(), none),
    }


MASKS = ["none", "causal", "padding before", "a static cache", "of the caller", "of all rows", "a row without keys"]


# how many heads there may be is asked whatever the dtype is, and 128 of them are slow on the software device
CASES = [*product([*((which, 4) for which in MASKS), ("causal", 1)], ROUNDING), (("causal", 128), torch.bfloat16)]


@pytest.mark.parametrize(("which", "heads", "dtype"), [(*case, dtype) for case, dtype in CASES])
@pytest.mark.filterwarnings("ignore:.*nothing to attend to:UserWarning")
def test_one_query_reads_latents_as_they_lie(kernel: ModuleType, which: str, heads: int, dtype: torch.dtype) -> None:
    """One launch of the operator, with the very tensors of the cache, and no further from float64 than a rounding."""
    tensors = drawn(heads, dtype)
    mask, seen = masks(kernel)[which]
    attended(kernel, tensors, mask)  # the first layer makes the mask for all
    with softnpu.poisoned_memory():
        found = attended(kernel, tensors, mask)
    assert launched() == {OPERATOR}
    assert npu_counts.read()[OPERATOR] == 1
    assert found.is_contiguous()
    assert found.dtype == dtype
    expected = exact(*tensors, seen)
    assert (found.cpu().double() - expected).abs().max() <= 2 * ROUNDING[dtype] * expected.abs().max()


def test_latents_are_no_further_from_float64_than_copies_of_them(kernel: ModuleType) -> None:
    """Than keys of latents and rotated parts, one behind the other, which another operator takes."""
    tensors = drawn(4, torch.bfloat16)
    found = attended(kernel, tensors)
    query, key = torch.cat(tensors[::2], -1).npu(), torch.cat(tensors[1::2], -1).npu()
    with torch.no_grad():
        copied = kernel.attention_forward(MODULE, query, key, tensors[1].npu(), None, scaling=SCALE)[0]
    expected = exact(*tensors)
    of_latents, of_copies = ((t.cpu().double() - expected).abs().max() for t in (found, copied))
    assert of_latents <= of_copies * 1.05  # the two round in another order


OTHERS = {
    "three heads": ({"heads": 3}, {}),
    "256 heads": ({"heads": 256}, {}),
    "two queries": ({"queries": 2}, {}),
    "float32": ({"dtype": torch.float32}, {}),
    "smaller latents": ({"size": 256}, {}),
    "a sink": ({}, {"s_aux": True}),
    "a bias": ({}, {"position_bias": True}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_what_the_operator_does_not_take_is_computed_all_the_same(kernel: ModuleType, which: str) -> None:
    sizes, options = OTHERS[which]
    sizes = {"heads": 4, "dtype": torch.bfloat16, "keys": 9} | sizes
    tensors = drawn(**sizes)
    heads, queries = tensors[0].shape[1:3]
    given = {}
    if "s_aux" in options:
        given["s_aux"] = torch.full((heads,), -100.0).bfloat16().npu()  # of which nothing is left beside the scores
    if "position_bias" in options:
        given["position_bias"] = torch.ones(1, heads, queries, 9).bfloat16().npu()
    found = attended(kernel, tensors, **given)
    assert OPERATOR not in launched()
    seen = torch.ones(queries, 9, dtype=torch.bool).tril(9 - queries)
    expected = exact(*tensors, seen)
    rounding = ROUNDING.get(found.dtype, 2.0**-20)
    assert (found.cpu().double() - expected).abs().max() <= 4 * rounding * expected.abs().max()


@pytest.mark.parametrize("leaf", range(4))
def test_a_gradient_that_is_needed_is_computed(kernel: ModuleType, leaf: int) -> None:
    tensors = [t.npu().requires_grad_(i == leaf) for i, t in enumerate(drawn(4, torch.bfloat16, keys=9))]
    query, key, *rotated = tensors
    npu_counts.reset()
    out = kernel.attention_forward(MODULE, query, key, key, None, scaling=SCALE, rotated=tuple(rotated))[0]
    assert OPERATOR not in npu_counts.read()
    out.float().square().sum().backward()
    precise = [t.detach().cpu().double().requires_grad_(i == leaf) for i, t in enumerate(tensors)]
    exact(*precise).square().sum().backward()
    found, expected = tensors[leaf].grad.cpu().double(), precise[leaf].grad
    # rounded are the result, its gradient, weights, scores' gradients and the sum of two gradients of latents
    assert (found - expected).abs().max() <= 8 * ROUNDING[torch.bfloat16] * expected.abs().max()


def test_latents_that_do_not_lie_so_are_copied_once(kernel: ModuleType) -> None:
    """As slices of one tensor, of which the operator would copy keys and values each."""
    query, key, query_rope, key_rope = (t.npu() for t in drawn(4, torch.bfloat16))
    together = torch.cat((key, key_rope), -1)
    key, key_rope = together.split((LATENT, ROTATED), dim=-1)
    npu_counts.reset()
    with torch.no_grad():
        options = {"scaling": SCALE, "rotated": (query_rope, key_rope)}
        found = kernel.attention_forward(MODULE, query, key, key, None, **options)[0]
    assert npu_counts.read()[OPERATOR] == 1
    assert npu_counts.read()["clone"] == 2
    assert torch.equal(found, attended(kernel, drawn(4, torch.bfloat16)))


def test_a_rotated_part_that_does_not_fit_is_refused(kernel: ModuleType) -> None:
    tensors = drawn(4, torch.bfloat16, keys=9)
    for wrong in (tensors[3][:, :, :8], tensors[3].half(), tensors[3][..., :32]):
        with pytest.raises(ValueError, match="rotated must be the rest of each query and key"):
            attended(kernel, tensors, rotated=(tensors[2].npu(), wrong.npu()))
