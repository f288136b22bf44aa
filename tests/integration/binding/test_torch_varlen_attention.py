"""torch's own attention of packed sequences on the NPU, called as a function while kernels are registered."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels_ext_npu
from kernels_ext_npu.binding.torch_operators import varlen_attention
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.measuring.roofline import SOCS
from tests.support import npu_counts
from tests.support.nearness import assert_near

varlen = pytest.importorskip("torch.nn.attention.varlen")
if "num_splits" not in str(torch.ops.torch_attn._varlen_attn.default._schema):
    pytest.skip("an older torch takes other arguments", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("registered")
FUSED, GRADIENT, WAITS = "npu_fusion_attention_v3", "npu_fusion_attention_grad_v3", "device_to_host_copies"
# what results and gradients are rounded to; of float32 sums of some dozen products, relative to the norm of the result
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
SAME = (0, 5, 5, 12)  # one sequence is empty
CAUSAL = (-1, 0)


def cumulative(ends: Sequence[int]) -> Tensor:
    """Put lengths on the NPU, as the function takes them."""
    return torch.tensor(ends, dtype=torch.int32, device="npu")


def tensors(
    dtype: torch.dtype = torch.bfloat16, queries: int = SAME[-1], keys: int = SAME[-1], size: int = 16, shared: int = 2
) -> list[Tensor]:
    """Draw q of four heads, k and v, as ``[T, N, D]`` of float64 on the CPU, of values that a dtype has."""
    torch.manual_seed(0)
    shapes = (queries, 4, size), (keys, 4 // shared, size), (keys, 4 // shared, size)
    return [torch.randn(shape).to(dtype).double().requires_grad_() for shape in shapes]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], key_ends: Sequence[int], window: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute each sequence by itself; the last query stands at the last key, as in flash attention."""
    results, sums = [], []
    for (begin, end), (key_begin, key_end) in zip(pairwise(ends), pairwise(key_ends)):
        mine = q[begin:end]
        keys, values = (t[key_begin:key_end].repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        distance = torch.arange(len(keys)) - torch.arange(len(mine)).unsqueeze(-1) - (len(keys) - len(mine))
        left, right = (torch.inf if limit < 0 else limit for limit in window)
        scores = torch.einsum("qnd,knd->nqk", mine, keys) * scale
        scores = scores.masked_fill((distance < -left) | (distance > right), -torch.inf)
        results.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(results), torch.cat(sums, 1)


def on_npu(exact: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Copy tensors to the NPU, as leaves."""
    return [tensor.detach().to("npu", dtype).requires_grad_() for tensor in exact]


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: tuple[int, int] = CAUSAL) -> Tensor:
    """Call torch's function as most do."""
    return varlen.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 7, 7, window_size=window, enable_gqa=True)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("window", "key_ends"),
    [
        ((-1, -1), SAME),
        (CAUSAL, SAME),
        ((3, 0), SAME),
        ((2, 1), SAME),
        (CAUSAL, (0, 9, 9, 22)),
        ((3, 0), (0, 9, 9, 22)),
        ((-1, -1), (0, 3, 4, 9)),  # fewer keys than queries, and keys that nobody looks at
    ],
    ids=str,
)
def test_values_sums_and_gradients(dtype: torch.dtype, window: tuple[int, int], key_ends: tuple[int, ...]) -> None:
    exact = tensors(dtype, keys=key_ends[-1])
    result, sums = one_by_one(*exact, SAME, key_ends, window, 0.3)
    grad = torch.randn_like(result).to(dtype)
    result.backward(grad.double())
    ours, aux = on_npu(exact, dtype), varlen.AuxRequest(lse=True)
    lengths = cumulative(SAME), cumulative(key_ends)
    options = {"scale": 0.3, "window_size": window, "enable_gqa": True, "num_splits": 1}
    found, lse = varlen.varlen_attn(*ours, *lengths, 7, 13, return_aux=aux, **options)
    found.backward(grad.to("npu"))
    assert_near(found, result, ROUNDING[dtype])
    assert_near(lse, sums)
    for mine, theirs in zip(ours, exact):
        assert_near(mine.grad, theirs.grad, ROUNDING[dtype])


def test_an_odd_size_and_tokens_behind_the_last_sequence() -> None:
    exact = tensors(queries=14, keys=14, size=33, shared=1)
    result, sums = one_by_one(*(tensor[:12] for tensor in exact), SAME, SAME, CAUSAL, 33**-0.5)
    ours = on_npu(exact)
    aux = varlen.AuxRequest(lse=True)
    found, lse = varlen.varlen_attn(*ours, cumulative(SAME), cumulative(SAME), 7, 7, window_size=CAUSAL, return_aux=aux)
    assert_near(found[:12], result, ROUNDING[torch.bfloat16])
    assert_near(lse[:, :12], sums)
    found.sum().backward()
    assert not any(each.any() for each in (found[12:], lse[:, 12:], *(tensor.grad[12:] for tensor in ours)))


@pytest.mark.parametrize(
    ("ends", "launches"),
    [((*range(0, 2051, 2),), 2), ((0, 5, *[5] * 1024, 12), 1)],
    ids=["many", "many empty ones"],
)
def test_more_sequences_than_a_launch_takes(ends: tuple[int, ...], launches: int) -> None:
    exact = tensors(torch.float32, ends[-1], ends[-1])
    result, _ = one_by_one(*exact, ends, ends, CAUSAL, 0.25)
    result.square().sum().backward()
    ours = on_npu(exact, torch.float32)
    npu_counts.reset()
    found = attend(*ours, cumulative(ends))
    found.square().sum().backward()
    assert npu_counts.read()[FUSED] == npu_counts.read()[GRADIENT] == launches
    assert_near(found, result)
    for mine, theirs in zip(ours, exact):
        assert_near(mine.grad, theirs.grad)


def test_it_writes_where_it_is_told_to() -> None:
    ours = on_npu(tensors(shared=1))
    out, lengths = torch.full_like(ours[0], torch.nan), cumulative(SAME)
    with torch.no_grad():
        found = varlen.varlen_attn_out(out, *ours, lengths, lengths, 7, 7, window_size=CAUSAL)
    assert found is out
    assert torch.equal(out, attend(*ours, lengths))


def three_layers(wrap: Callable, weight: Tensor, lengths: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """Train layers that share a weight and lengths; return result and gradients, and what was counted."""

    def layer(x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (x @ weight).view(-1, 3, 4, 16).unbind(1)
        return x + attend(q, k, v, lengths).flatten(1)

    weight.grad = None
    wrapped, x = wrap(layer), torch.linspace(-1, 1, 12 * 64).view(12, 64).bfloat16().to("npu").requires_grad_()
    npu_counts.reset()
    y = x
    for _ in range(3):
        y = wrapped(y, lengths)
    y.float().square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad.clone()], npu_counts.read()


def keep_attention(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keep what the operator returns, and compute all else again."""
    is_kept = operator is torch.ops.torch_attn._varlen_attn.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


WRAPS = {
    "plain": (lambda layer: layer, 3, 1),
    "a checkpoint": (lambda layer: functools.partial(checkpoint, layer, use_reentrant=False), 6, 1),
    # it gives each layer lengths of its own
    "a reentrant one": (lambda layer: functools.partial(checkpoint, layer, use_reentrant=True), 6, 4),
    "one that keeps attention": (
        lambda layer: functools.partial(
            checkpoint,
            layer,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, keep_attention),
        ),
        3,
        1,
    ),
    "compiled": (functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False), 3, 1),
    "compiled for any size": (
        functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True),
        3,
        1,
    ),
}


@pytest.mark.parametrize(("wrap", "launches", "waits"), WRAPS.values(), ids=WRAPS)
def test_training_launches_one_operator_a_layer_and_waits_once(wrap: Callable, launches: int, waits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 192).bfloat16().to("npu").requires_grad_()
    expected, _ = three_layers(lambda layer: layer, weight, cumulative(SAME))
    found, counts = three_layers(wrap, weight, cumulative(SAME))
    assert all(map(torch.equal, found, expected))
    assert (counts[FUSED], counts[GRADIENT], counts[WAITS]) == (launches, 3, waits)


def test_what_is_launched_beside_the_operators_is_small() -> None:
    """It makes numbers of which there is one a query and head."""
    ours, lengths = on_npu(tensors()), cumulative(SAME)
    attend(*ours, lengths)  # reads lengths, and makes the mask of all calls
    npu_counts.reset()
    found = attend(*ours, lengths)
    assert launched() == {FUSED: 1, "log": 1, "add": 1}
    grad = torch.ones_like(found)
    npu_counts.reset()
    found.backward(grad)
    assert launched() == {GRADIENT: 1, "zeros": 1, "clone": 1, "ones_like": 1}


def launched() -> dict[str, int]:
    """Return what was counted since the last reset, without what was not."""
    return {name: count for name, count in npu_counts.read().items() if count}


def test_without_memory_it_counts_what_the_device_does() -> None:
    """As `inspect` counts a model."""
    values = KnownValues()
    with FakeTensorMode(), Counting(values, SOCS["910b3"]) as counting, values.read_at_once():
        lengths = values.learn(torch.zeros(4, dtype=torch.int32, device="npu"), torch.tensor(SAME))
        q, k, v = (torch.empty(12, 4, 16, dtype=torch.bfloat16, device="npu").requires_grad_() for _ in range(3))
        attend(q, k, v, lengths).sum().backward()
    counts = counting.counts()
    assert (counts.launches[FUSED], counts.launches[GRADIENT], counts.waits) == (1, 1, 1)
    assert not any("varlen" in name for name in counts.launches)
    pairs = 4 * (5 * 6 // 2 + 7 * 8 // 2)  # of a query and a key that it sees
    assert counts.flops[FUSED] == 2 * pairs * 2 * 16


def test_autocast_leaves_it_the_dtype_of_its_tensors() -> None:
    ours, lengths = on_npu(tensors(torch.float32), torch.float32), cumulative(SAME)
    with torch.autocast("npu", torch.bfloat16):
        found = attend(*ours, lengths)
    assert found.dtype == torch.float32
    assert torch.equal(found, attend(*ours, lengths))


@pytest.mark.parametrize(
    "options",
    [
        {"seqused_k": torch.tensor([5, 0, 7], dtype=torch.int32)},
        {"seqused_k": torch.tensor([5, 0, 7], dtype=torch.int32), "block_table": torch.zeros(3, 1, dtype=torch.int32)},
    ],
    ids=["a part of the keys", "pages"],
)
def test_keys_in_a_cache_are_refused(options: dict[str, Tensor]) -> None:
    q, k, v = on_npu(tensors(shared=1))
    if "block_table" in options:
        k, v = k.unsqueeze(0), v.unsqueeze(0)
    options = {name: tensor.to("npu") for name, tensor in options.items()}
    with torch.no_grad(), pytest.raises(NotImplementedError, match="in place of block_table and seqused_k"):
        varlen.varlen_attn(q, k, v, cumulative(SAME), cumulative(SAME), 7, 7, **options)


@pytest.mark.parametrize(
    ("dtype", "size", "window", "key_ends"),
    [
        (torch.float64, 16, (-1, -1), SAME),
        (torch.float32, 17, (-1, -1), SAME),
        (torch.bfloat16, 776, (-1, -1), SAME),
        (torch.bfloat16, 16, CAUSAL, (0, 3, 3, 12)),  # the first query stands before the first key
        (torch.bfloat16, 16, (-1, -1), (0, 0, 5, 12)),
    ],
    ids=["float64", "size", "large", "causal", "no keys"],
)
def test_what_no_operator_takes_is_refused(
    dtype: torch.dtype, size: int, window: tuple[int, int], key_ends: tuple[int, ...]
) -> None:
    ours = on_npu(tensors(dtype, size=size, shared=1), dtype)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func of"):
        varlen.varlen_attn(*ours, cumulative(SAME), cumulative(key_ends), 7, 7, window_size=window)


def test_a_gradient_that_no_operator_takes_is_refused() -> None:
    q, k, v = on_npu(tensors(shared=1))
    found = attend(q, k.detach(), v.detach(), cumulative(SAME), (0, 0))
    assert_near(found, v, ROUNDING[torch.bfloat16])
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func of"):
        found.sum().backward()


@pytest.mark.parametrize(
    ("ends", "key_ends", "message"),
    [((0, 5, 13), (0, 5, 12), "at most 12"), ((0, 12), (0, 5, 12), "2"), ((1, 12), (1, 12), "begin with 0")],
    ids=["beyond", "numbers", "begin"],
)
def test_lengths_that_do_not_fit_are_refused(ends: Sequence[int], key_ends: Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        varlen.varlen_attn(*on_npu(tensors(shared=1)), cumulative(ends), cumulative(key_ends), 7, 7)


@pytest.mark.parametrize("leave", [kernels_ext_npu.unregister, lambda: kernels_ext_npu.register(kernels=["RMSNorm"])])
def test_without_the_kernel_it_is_torchs_again(leave: Callable[[], None]) -> None:
    ours, lengths = on_npu(tensors()), cumulative(SAME)
    attend(*ours, lengths)
    leave()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        attend(*ours, lengths)


class Attending(nn.Module):
    """Other people's code, with torch's function in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4, 1))

    def forward(self, *args: Tensor) -> Tensor:
        return attend(*args) * self.gate


@pytest.mark.parametrize("is_known", [True, False])
def test_an_operator_of_other_arguments_is_refused(is_known: bool, monkeypatch) -> None:
    """As that of a torch that is not known yet may be."""
    monkeypatch.setattr(varlen_attention, "_is_known", lambda: is_known)
    model = nn.ModuleDict({"part": Attending()}).to("npu")
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert row.swapped == is_known
    with (
        nullcontext() if is_known else pytest.raises(NotImplementedError, match="does not know the arguments of torch")
    ):
        model["part"](*on_npu(tensors()), cumulative(SAME))


@pytest.mark.parametrize("ours", ["_attend", "_gradients"])
def test_arguments_are_known_by_name(ours: str, monkeypatch) -> None:
    is_known = varlen_attention._is_known.__wrapped__
    assert is_known()
    monkeypatch.setattr(varlen_attention, ours, lambda query, key, cache: None)
    assert not is_known()


def test_in_inference_mode() -> None:
    ours, lengths = on_npu(tensors()), cumulative(SAME)
    with torch.inference_mode():
        found = attend(*ours, lengths)
    assert torch.equal(found.clone(), attend(*ours, lengths))
