"""What the mask function describes, against the masks that transformers makes; and the attention that takes them."""

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import masking_utils

from kernels_ext_npu.selftest.functions import attention as attention_formula
from tests.support import npu_counts

TOKENS = 12
SEQUENCES = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 12])
# where each row begins and counts on, which transformers asks of packed sequences from 5.23 on
POSITIONS = torch.cat([torch.arange(2, 7), torch.arange(4), torch.arange(3)]), torch.arange(12)
REMAPS = hasattr(masking_utils, "packed_sequence_compatibility_function")
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1], [-1] * 12])


def functions() -> dict[str, Any]:
    """Mask functions of transformers, and some of a caller; whether each is asked of one index at a time."""
    m = masking_utils
    causal, none = m.causal_mask_function, torch.zeros(2, dtype=torch.long)
    packed, blocks = m.packed_sequence_mask_function, m.blockwise_overlay(BLOCKS)
    found = {
        "causal": (causal, False),
        "sliding": (m.sliding_window_causal_mask_function(4), False),
        "chunked": (m.chunked_causal_mask_function(5, none), False),
        "bidirectional": (m.bidirectional_mask_function, False),
        "bidirectional window": (m.sliding_window_bidirectional_mask_function(3), False),
        "packed": (m.and_masks(causal, packed(SEQUENCES)), False),
        "packed and sliding": (m.and_masks(m.sliding_window_causal_mask_function(3), packed(SEQUENCES)), False),
        "blocks of images": (m.or_masks(causal, blocks), False),
        "prefix": (m.or_masks(causal, lambda b, h, q, k: k < 4), True),
        "every second": (m.and_masks(causal, lambda b, h, q, k: (q - k) % 2 == 0), True),
        "packed and chunked": (m.and_masks(m.chunked_causal_mask_function(3, none), packed(SEQUENCES)), False),
    }
    if REMAPS:
        remapped = partial(
            m.packed_sequence_compatibility_function,
            position_ids=torch.stack(POSITIONS),
            packed_sequence_mask=SEQUENCES,
        )
        found |= {
            "packed by positions": (remapped(causal), False),
            "packed and sliding by positions": (remapped(m.sliding_window_causal_mask_function(3)), False),
            "packed and chunked by positions": (remapped(m.chunked_causal_mask_function(3, none)), False),
            "packed and odd by positions": (remapped(lambda b, h, q, k: (q % 3 >= k % 3) & (k <= q)), True),
        }
    return found


PADDING = {
    "none": None,
    "left": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]).bool(),
    "right": torch.tensor([[1] * 9 + [0] * 3, [1] * 12]).bool(),
    "both": torch.tensor([[0] * 2 + [1] * 6 + [0] * 4, [1] * 12]).bool(),
    "one each": torch.tensor([[0] * 3 + [1] * 9, [1] * 8 + [0] * 4]).bool(),
    "between": torch.tensor([[1] * 4 + [0] * 3 + [1] * 5, [1] * 12]).bool(),
    "everything": torch.tensor([[0] * 12, [1] * 12]).bool(),
}


class Module(nn.Module):
    is_causal = True


def describe(kernel: ModuleType, name: str, padding: Tensor | None, queries: int, device: str) -> tuple[Any, Tensor]:
    """Return the description and transformers' mask, of the last queries among all keys."""
    function, one_by_one = functions()[name]
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": TOKENS, "q_offset": TOKENS - queries}
    options = sizes | {"mask_function": function, "use_vmap": one_by_one, "allow_is_causal_skip": False}
    expected = masking_utils.sdpa_mask(**options, attention_mask=padding)
    moved = None if padding is None else padding.to(device)
    found = kernel.attention_mask(**options, attention_mask=moved, device=device)
    return found, expected


def seen_by(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute attention in float64; a query that sees nothing gives zero."""
    q, k, v = q.double(), *(t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).masked_fill(~seen, 0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("queries", [TOKENS, 5, 1])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", functions())
def test_the_description_is_the_mask_of_transformers(kernel: ModuleType, name: str, padding: str, queries: int) -> None:
    """Its shape, its items and torch's functions of it are those of that tensor."""
    found, expected = describe(kernel, name, PADDING[padding], queries, "cpu")
    assert found.shape == expected.shape
    assert found.dtype == torch.bool
    assert torch.equal(found[:, 0], expected[:, 0])
    assert torch.equal(torch.where(found, 1.0, 0.0), torch.where(expected, 1.0, 0.0))
    other = torch.rand(TOKENS) > 0.5
    for act in (
        lambda mask: mask == 0,
        lambda mask: ~mask,
        lambda mask: other & mask,
        lambda mask: mask | other,
        lambda mask: 1.0 - mask.float(),
        lambda mask: mask * 2.0,
    ):
        assert torch.equal(act(found), act(expected))


@settings(max_examples=160, deadline=None)
@given(st.sampled_from(list(functions())), st.sampled_from(list(PADDING)), st.sampled_from([TOKENS, 5, 1]), st.data())
def test_attention_sees_what_the_mask_says(kernel: ModuleType, name: str, padding: str, queries: int, data) -> None:
    """On the CPU and on the NPU, forward and gradients, against float64 with the mask of transformers, in every row.

    float32 to 2^-18, since gradients of keys are sums over 24 rows; a query that sees no key gives zero.
    """
    device = data.draw(st.sampled_from(["cpu", "npu"]))
    strided = data.draw(st.booleans())
    found, expected = describe(kernel, name, PADDING[padding], queries, "cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, generator=generator) for n, s in ((4, queries), (2, TOKENS), (2, TOKENS)))
    if strided:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    tensors = [t.to(device).requires_grad_() for t in (q, k, v)]
    out, weights = kernel.attention_forward(Module(), *tensors, found)
    assert weights is None
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = seen_by(*exact, expected)
    direction = torch.randn(truth.shape, generator=generator)
    (out * direction.to(device)).sum().backward()
    (truth * direction)[expected[:, 0].any(-1)].sum().backward()
    assert out.is_contiguous()  # models take views of it
    for found, wanted in ((out, truth), *((t.grad, e.grad) for t, e in zip(tensors, exact))):
        assert (found.detach().cpu().double() - wanted).abs().max() <= 2**-18


def test_a_mask_of_packed_sequences_is_that_of_those_of_its_launch(kernel: ModuleType, npu_counters) -> None:
    """No operator is told of windows that begin at the first query; the longest sequence is in the second launch."""
    batch, tokens = 1025, 5
    padding = torch.ones(batch, tokens, dtype=torch.bool)
    padding[:-1, 1:] = False
    function = masking_utils.sliding_window_causal_mask_function(3)
    sizes = {"batch_size": batch, "q_length": tokens, "kv_length": tokens, "q_offset": 0, "mask_function": function}
    found = kernel.attention_mask(**sizes, attention_mask=padding, device="cpu")
    tensors = [torch.randn(batch, 1, tokens, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    leaves, exact = ([move(t).requires_grad_() for t in tensors] for move in (Tensor.npu, Tensor.double))
    out, _ = kernel.attention_forward(Module(), *leaves, found)
    truth = seen_by(*exact, masking_utils.sdpa_mask(**sizes, attention_mask=padding, allow_is_causal_skip=False))
    assert npu_counters()["npu_fusion_attention_v3"] == 2
    out.square().sum().backward()
    truth.square().sum().backward()
    for one, wanted in ((out, truth), *((t.grad, e.grad) for t, e in zip(leaves, exact))):
        assert (one.detach().cpu().double() - wanted).abs().max() <= 2**-18  # float32, sums over up to five rows


@pytest.mark.parametrize("padding", ["left", "right", "between"])
def test_one_row_of_padding_is_that_of_all_sequences(kernel: ModuleType, padding: str) -> None:
    """As a mask of one row is for a batch of more; asked of one sequence before, too."""
    kept = PADDING[padding][:1]
    mask = kernel.attention_mask(1, TOKENS, TOKENS, attention_mask=kept)
    q, k, v = (torch.randn(3, 2, TOKENS, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    kernel.attention_forward(Module(), *(t[:1].npu() for t in (q, k, v)), mask)
    out, _ = kernel.attention_forward(Module(), *(t.npu() for t in (q, k, v)), mask)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & kept[:, None, None]
    assert (out.cpu().double() - seen_by(q, k, v, seen)).abs()[:, kept[0]].max() <= 2**-20


PLAIN = ["causal", "sliding", "chunked", "bidirectional", "bidirectional window"]
PACKED = [name for name in functions() if "packed" in name and "odd" not in name]


@pytest.mark.parametrize("name", [*PLAIN, *PACKED, "prefix"])
def test_no_pattern_but_an_unknown_one_makes_a_mask_and_the_host_does_not_wait(kernel: ModuleType, name: str) -> None:
    q, k, v = (torch.randn(2, n, TOKENS, 8).npu() for n in (4, 2, 2))
    npu_counts.reset()
    found, _ = describe(kernel, name, None, TOKENS, "npu")
    for _ in range(3):
        kernel.attention_forward(Module(), q, k, v, found)
    counts = npu_counts.read()
    assert counts["npu_fusion_attention_v3"] == 3
    assert not counts.get("stream_syncs")
    assert counts.get("logical_not", 0) == bool(found._masks) == (name == "prefix")


@pytest.mark.skipif(not REMAPS, reason="chunks are of places in a row, whatever positions are")
@pytest.mark.parametrize("first", [0, 2])
def test_positions_of_a_batch_that_is_not_packed_move_no_chunks(kernel: ModuleType, first: int) -> None:
    """transformers looks whether any row is packed, for which the host waits; ours hands positions on."""
    chunks = masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long))
    positions, ids = torch.arange(first, first + TOKENS).expand(2, -1), torch.zeros(2, TOKENS, dtype=torch.long)
    function = masking_utils.packed_sequence_compatibility_function(chunks, positions, ids)
    found = kernel.attention_mask(2, TOKENS, TOKENS, mask_function=function)
    sizes = {"batch_size": 2, "q_length": TOKENS, "kv_length": TOKENS, "allow_is_causal_skip": False}
    assert torch.equal(found.mask(), masking_utils.sdpa_mask(**sizes, mask_function=chunks))
    q = torch.randn(2, 1, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    out = kernel.attention_forward(Module(), *[q.npu()] * 3, found)[0]
    assert (out.cpu().double() - seen_by(q, q, q, found.mask())).abs().max() <= 2**-20


# ---- lengths of the caller -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_lengths_of_the_caller(kernel: ModuleType, causal: bool, window: int | None) -> None:
    """As towers of vision models and collators give them; a window is in both directions where it is not causal."""
    lengths = [5, 4, 3]
    q, k, v = (torch.randn(1, n, TOKENS, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    ends = torch.tensor([0, *lengths]).cumsum(0).int().npu()
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    npu_counts.reset()
    for _ in range(2):
        out, _ = kernel.attention_forward(
            Module(), *(t.npu() for t in (q, k, v)), None, is_causal=causal, sliding_window=window, **options
        )
    assert npu_counts.read()["stream_syncs"] == 1
    limits = (-1, -1) if window is None else (window - 1, window - 1)
    tensors = (t[0].transpose(0, 1).double() for t in (q, k, v))
    expected = attention_formula.packed(*tensors, lengths, lengths, 8**-0.5, causal=causal, window=limits)
    assert (out[0].cpu().double() - expected).abs().max() <= 2**-20


SEVERAL = torch.arange(5).repeat_interleave(torch.tensor([4, 5, 3, 6, 6])).view(2, TOKENS)


@pytest.mark.parametrize(
    ("name", "padded", "compiled"),
    [
        ("causal", False, True),
        ("sliding", False, True),
        ("chunked", False, False),
        ("blocks of images", False, False),
        *(("prefix", padded, compiled) for padded in (False, True) for compiled in (False, True)),
        *((name, True, False) for name in ("causal", "chunked", "blocks of images")),
    ],
)
def test_lengths_of_the_caller_beside_any_mask(kernel: ModuleType, name: str, padded: bool, compiled: bool) -> None:
    """A query sees what both leave it, in a graph too, where masks are tensors; elsewhere it is computed once.

    Padding goes before, as transformers' flash attention has it: lengths may be those of the tokens without it.
    """
    torch.compiler.reset()
    function, one_by_one = functions()[name]
    sizes = {"batch_size": 2, "q_length": TOKENS, "kv_length": TOKENS, "mask_function": function}
    options = sizes | {"use_vmap": one_by_one, "allow_is_causal_skip": False}
    padding = PADDING["left"] if padded else None
    seen = masking_utils.sdpa_mask(**options, attention_mask=padding)
    if not padded:
        seen = seen & (SEVERAL.unsqueeze(-1) == SEVERAL.unsqueeze(-2)).unsqueeze(1)
    ends, key_ends = torch.tensor([[0, 9, 21] if padded else [0, 4, 9, 12, 18, 24]] * 2, dtype=torch.int32).npu()
    kept = padding.npu() if padded else None
    q, k, v = (torch.randn(2, 2, TOKENS, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))

    def attention(*tensors: Tensor) -> Tensor:
        mask = kernel.attention_mask(**options, attention_mask=kept, device="npu")
        for _ in range(2):  # layers
            out, _ = kernel.attention_forward(Module(), *tensors, mask, cu_seq_lens_q=ends, cu_seq_lens_k=key_ends)
        return out

    call = torch.compile(attention, backend="aot_eager") if compiled else attention
    npu_counts.reset()
    found = call(*(t.npu() for t in (q, k, v)))
    assert compiled or padded or npu_counts.read()["ne"] == 1
    error = (found.cpu().double() - seen_by(q, k, v, seen)).abs()
    assert (error[padding] if padded else error).max() <= 2**-20


@pytest.mark.skipif(torch.npu.device_count() < 2, reason="it needs two devices")
def test_lengths_beside_a_mask_go_to_the_device_of_each_layer(kernel: ModuleType) -> None:
    mask = kernel.attention_mask(1, TOKENS, TOKENS, mask_function=functions()["prefix"][0], use_vmap=True)
    ends = torch.tensor([0, 5, TOKENS])
    q = torch.randn(1, 2, TOKENS, 8)
    first, second = (
        kernel.attention_forward(Module(), *[q.to(f"npu:{i}")] * 3, mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends)[0]
        for i in range(2)
    )
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("name", [None, "causal", "sliding", "chunked", "blocks of images", "prefix"])
def test_chosen_keys_in_packed_sequences(kernel: ModuleType, name: str | None) -> None:
    """A query sees what was chosen, of what the mask and the lengths of the caller leave it."""
    q, k, v = (torch.randn(2, 2, TOKENS, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    chosen = torch.rand(2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)).topk(5).indices
    chosen[..., 0] = torch.arange(TOKENS)
    seen = torch.zeros(2, TOKENS, TOKENS, dtype=torch.bool).scatter(-1, chosen, True).unsqueeze(1)
    seen &= (SEVERAL.unsqueeze(-1) == SEVERAL.unsqueeze(-2)).unsqueeze(1)
    function, one_by_one = functions()[name or "causal"]
    options = {"mask_function": function, "use_vmap": one_by_one, "allow_is_causal_skip": False}
    seen &= masking_utils.sdpa_mask(2, TOKENS, TOKENS, **options)
    mask = None if name is None else kernel.attention_mask(2, TOKENS, TOKENS, **options, device="npu")
    ends = torch.tensor([0, 4, 9, 12, 18, 24]).int().npu()
    out, _ = kernel.attention_forward(
        Module(), *(t.npu() for t in (q, k, v)), mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends, indices=chosen.npu()
    )
    assert (out.cpu().double() - seen_by(q, k, v, seen)).abs().max() <= 2**-20


def test_what_is_not_computed_is_refused(kernel: ModuleType) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="block_indices are not supported"):
        kernel.attention_forward(Module(), q, q, q, None, block_indices=torch.zeros(1))
    with pytest.raises(ValueError, match="attention_mask is for 5 queries and 5 keys, got 4 and 4"):
        kernel.attention_forward(Module(), q, q, q, kernel.attention_mask(1, 5, 5))


def test_a_graph_reads_masks_when_it_is_replayed(kernel: ModuleType) -> None:
    query, key, value = (torch.randn(1, 2, n, 16, device="npu") for n in (1, TOKENS, TOKENS))
    mask, graph = torch.zeros(1, 1, 1, TOKENS, dtype=torch.bool, device="npu"), torch.npu.NPUGraph()

    def attend() -> Tensor:
        return kernel.attention_forward(Module(), query, key, value, mask)[0]

    mask[..., :3] = True
    attend()  # what is made of a mask is kept, for all layers
    with torch.npu.graph(graph):
        captured = attend()
    mask[..., 5:] = True
    graph.replay()
    assert captured.tolist() == attend().tolist()


def test_lengths_of_a_graph_cannot_be_read(kernel: ModuleType) -> None:
    tokens = torch.randn(TOKENS, 2, 16, device="npu")
    ends = torch.tensor([0, 5, TOKENS], dtype=torch.int32, device="npu")

    def attend() -> Tensor:
        return kernel.flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, TOKENS, TOKENS, causal=True)

    attend()  # the lengths are read, and remembered
    with pytest.raises(RuntimeError, match="the host waits"), torch.npu.graph(torch.npu.NPUGraph()):
        attend()
