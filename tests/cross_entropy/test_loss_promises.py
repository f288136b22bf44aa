"""What the losses promise beside their values: sizes, waits, frozen heads in graphs, autocast, shards."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import pairwise, product
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.cross_entropy.losses import compute_logits, draw, leaves
from tests.support import npu_counts
from tests.support.memory import Largest

TOKENS, WORDS, HIDDEN = 24, 96, 8


def tensors(dtype: torch.dtype = torch.float32, device: str = "npu") -> list[Tensor]:
    return leaves(draw(TOKENS, WORDS, HIDDEN, bias=True)[:3], dtype, device)


def labels(device: str = "npu") -> Tensor:
    return draw(TOKENS, WORDS, HIDDEN).labels.to(device)


ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.5, "softcap": 4.0}


def test_the_host_does_not_wait(kernel: ModuleType) -> None:
    hidden, weight, bias = tensors(torch.bfloat16)
    items, wanted = torch.tensor(20, device="npu"), labels()
    before = npu_counts.read().get("stream_syncs", 0)
    kernel.linear_cross_entropy(hidden, weight, wanted, bias, num_items=items, **ALL).backward()
    kernel.cross_entropy(hidden, wanted.clamp(max=HIDDEN - 1), num_items=items, **ALL).backward()
    jsd_loss(kernel, [hidden, weight, bias], wanted, num_items=items).backward()
    assert npu_counts.read().get("stream_syncs", 0) == before


@pytest.mark.parametrize(("reduction", "sums"), [("none", 0), ("sum", 1), ("mean", 2)])
def test_rows_are_counted_for_their_mean_alone(kernel: ModuleType, npu_counters, reduction: str, sums: int) -> None:
    kernel.cross_entropy(torch.randn(TOKENS, WORDS, device="npu"), labels(), reduction=reduction)
    assert npu_counters().get("sum", 0) == sums


def linear_loss(kernel: ModuleType, own: list[Tensor], wanted: Tensor, **options: int) -> Tensor:
    return kernel.linear_cross_entropy(own[0], own[1], wanted, *own[2:], **options)


def entropy_loss(kernel: ModuleType, own: list[Tensor], wanted: Tensor, **options: int) -> Tensor:
    log_probs, entropy = kernel.linear_log_probs_and_entropy(own[0], own[1], wanted, *own[2:], **options)
    return (log_probs - 0.01 * entropy).sum()


def jsd_loss(kernel: ModuleType, own: list[Tensor], wanted: Tensor, **options: int) -> Tensor:
    """Of a teacher that has the same head, and the hidden states in the other order."""
    hidden, weight, *bias = (tensor.detach() for tensor in own)
    return kernel.linear_generalized_jsd(*own[:2], hidden.flip(0), weight, wanted, *own[2:], *bias, beta=0.1, **options)


each_loss = pytest.mark.parametrize("loss", [linear_loss, entropy_loss, jsd_loss])


@each_loss
def test_autocast_casts_what_it_casts_for_a_linear_layer(kernel: ModuleType, loss) -> None:
    """As with the casts written out: exactly."""
    own, cast = tensors(), tensors()
    with torch.autocast("npu", torch.bfloat16):
        found = loss(kernel, own, labels())
    found.backward()
    expected = loss(kernel, [tensor.bfloat16() for tensor in cast], labels())
    expected.backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(own, cast))
    assert own[1].grad.dtype == torch.float32


@each_loss
def test_one_graph_of_a_frozen_head_gives_what_the_function_gives(kernel: ModuleType, loss) -> None:
    """The same operators in the same order: exactly."""
    torch.compiler.reset()
    wanted, found = labels(), []
    for call in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        hidden, *head = tensors()
        y = call(kernel, [hidden, *(tensor.detach() for tensor in head)], wanted)
        y.backward()
        found.append((y.detach(), hidden.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("loss", "kept"), [(linear_loss, 0), (linear_loss, 1), *product((entropy_loss, jsd_loss), (0, 1, 2))]
)
def test_what_is_kept_changes_no_number(kernel: ModuleType, monkeypatch, loss, kept) -> None:
    """Of two pieces none, one or both are kept in 16 bits, and all are computed again for a second backward.

    A head whose logits are all kept is computed by tokens, which rounds elsewhere.
    """
    monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.chunking"), "LOGITS_BUDGET", kept * TOKENS * WORDS)
    found = []
    for pieces in (None, 2):
        own = tensors(torch.bfloat16)
        y = loss(kernel, own, labels(), pieces=pieces)
        found += [torch.autograd.grad(y, own, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0]))


@pytest.mark.parametrize(
    ("loss", "is_frozen", "tokens", "part"),
    [
        (linear_loss, False, 32768, 1 / 7),  # the last of 8 pieces is smaller
        (entropy_loss, False, 4096, 1 / 4),
        *((jsd_loss, is_frozen, 4096, 1366 / 4096) for is_frozen in (False, True)),
    ],
)
def test_no_tensor_is_larger_than_a_part_of_the_logits(kernel: ModuleType, loss, is_frozen, tokens, part) -> None:
    """Of as many words and tokens as a real head has, in 16 bits."""
    words = 151_936
    with torch._subclasses.FakeTensorMode(), Largest() as largest:
        own = [torch.empty(n, 64, dtype=torch.bfloat16, device="npu") for n in (tokens, words)]
        for tensor in own[: 1 if is_frozen else 2]:
            tensor.requires_grad_()
        loss(kernel, own, torch.zeros(tokens, dtype=torch.long, device="npu")).backward()
        assert all(tensor.grad is not None for tensor in own if tensor.requires_grad)
    assert largest.bytes <= part * tokens * words * 2


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_memory_that_was_not_written_is_not_read(kernel: ModuleType, poisoned_memory, dtype, device) -> None:
    hidden, weight, bias = tensors(dtype, device)
    loss = kernel.linear_cross_entropy(hidden, weight, labels(device), bias)
    loss.backward()
    kernel.linear_cross_entropy(hidden, weight.detach(), labels(device)).backward()
    kernel.cross_entropy(compute_logits(hidden, weight, bias), labels(device)).backward()
    assert all(tensor.isfinite().all() for tensor in (loss, hidden.grad, weight.grad, bias.grad))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "batchmean"}, ValueError, "none, mean, sum"),
        ({"reduction": "sum", "num_items": 3}, ValueError, "num_items"),
        ({"label_smoothing": 1.5}, ValueError, "between 0 and 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"labels": torch.rand(TOKENS)}, TypeError, "labels must be integers"),
        ({"labels": torch.ones(3, dtype=torch.long)}, ValueError, r"labels \[N\]"),
        ({"weight": torch.ones(WORDS, 3)}, ValueError, r"weight must be \[V, 8\]"),
        ({"bias": torch.ones(WORDS - 1)}, ValueError, rf"bias must be \[{WORDS}\], got \[{WORDS - 1}\]"),
        ({"bias": torch.ones(1)}, ValueError, rf"bias must be \[{WORDS}\]"),
        ({"hidden_states": torch.ones(TOKENS, HIDDEN, dtype=torch.long)}, TypeError, "floating point"),
        ({"pieces": 0}, ValueError, "at least 1"),
        ({"weight": torch.ones(0, HIDDEN)}, ValueError, r"weight must be \[V, 8\], got \[0, 8\]"),
        (
            {"weight": torch.ones(WORDS, HIDDEN).half()},
            ValueError,
            "must have one dtype, got torch.float16, torch.float32",
        ),
        (
            {"labels": torch.ones(TOKENS, dtype=torch.long, device="meta")},
            ValueError,
            "labels must be on cpu, got meta",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kernel: ModuleType, change, error, message) -> None:
    hidden, weight, _ = tensors(device="cpu")
    with pytest.raises(error, match=message):
        kernel.linear_cross_entropy(**{"hidden_states": hidden, "weight": weight, "labels": labels("cpu"), **change})


@pytest.mark.parametrize("options", [{}, ALL])
def test_shards_of_the_vocabulary_give_what_all_of_it_gives(kernel: ModuleType, options) -> None:
    """Two shards in two threads, to the rounding of sums in float32 in another order.

    On the CPU, where each thread computes its own backward: torch has one thread for a device.
    """
    whole, halves, wanted = (tensors(device="cpu"), tensors(device="cpu"), labels("cpu"))
    expected = kernel.linear_cross_entropy(whole[0], whole[1], wanted, whole[2], **options)
    expected.backward()
    meeting = Meeting(2)
    cut = [0, 60, WORDS]
    parts = [[halves[0].detach(), *(t.detach()[a:b] for t in halves[1:])] for a, b in pairwise(cut)]
    parts = [[tensor.clone().requires_grad_() for tensor in part] for part in parts]

    def run(rank: int) -> Tensor:
        shard = kernel.Shard(cut[rank], WORDS, lambda tensor, operation: meeting.reduce(rank, tensor, operation))
        hidden, weight, bias = parts[rank]
        loss = kernel.linear_cross_entropy(hidden, weight, wanted, bias, shard=shard, **options)
        loss.backward()
        return loss

    losses = meeting.run(run)
    for loss, part in zip(losses, parts):
        torch.testing.assert_close(loss, expected, rtol=2**-20, atol=0)
        torch.testing.assert_close(part[0].grad, whole[0].grad, rtol=0, atol=2**-20)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i].grad for part in parts]), whole[i].grad, rtol=0, atol=2**-20)


class Meeting:
    """Reduces tensors over threads that stand for processes."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def reduce(self, rank: int, tensor: Tensor, operation: str) -> Tensor:
        self.tensors[rank] = tensor
        self.barrier.wait()
        stacked = torch.stack(self.tensors)
        result = stacked.sum(0) if operation == "sum" else stacked.amax(0)
        self.barrier.wait()
        return result

    def run(self, function: Callable[[int], Tensor]) -> list[Tensor]:
        with ThreadPoolExecutor(len(self.tensors)) as threads:
            return list(threads.map(function, range(len(self.tensors))))
