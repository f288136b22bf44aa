"""How often a step passes over logits, with what CANN's operators do behind a launch, and what that must not change."""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.distance import tensors
from tests.cross_entropy.losses import draw, leaves

WORDS = 151_936


def linear_loss(kernel: ModuleType, tokens: int, is_frozen: bool = False, **options: float) -> Tensor:
    hidden, weight = (torch.empty(n, 16, dtype=torch.bfloat16, device="npu") for n in (tokens, WORDS))
    hidden.requires_grad_(), weight.requires_grad_(not is_frozen)
    return kernel.linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long, device="npu"), **options)


def entropy_loss(kernel: ModuleType, tokens: int) -> Tensor:
    hidden, weight = (torch.empty(n, 16, dtype=torch.bfloat16, device="npu") for n in (tokens, WORDS))
    labels = torch.zeros(tokens, dtype=torch.long, device="npu")
    found = kernel.linear_log_probs_and_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels)
    return torch.stack(found).sum()


def logits_loss(kernel: ModuleType, tokens: int) -> Tensor:
    logits = torch.empty(tokens, WORDS, dtype=torch.bfloat16, device="npu", requires_grad=True)
    return kernel.cross_entropy(logits, torch.zeros(tokens, dtype=torch.long, device="npu"))


PRODUCT = 2  # logits in 16 bits are written, or read by a product
SUMS = 2 + 6 + 8  # the largest of each row, a cast to float32, and log_softmax of that
SOFTMAX = 2 + 2
GRADIENT = 6 + 8 + 6  # float32 of a sum with 16 bits, its exponential in place, and a cast


@pytest.mark.parametrize(
    ("loss", "tokens", "options", "passes"),
    [
        (linear_loss, 4096, {}, 3 * PRODUCT + SUMS + SOFTMAX),
        (linear_loss, 4096, {"is_frozen": True}, 2 * PRODUCT + SUMS + SOFTMAX),
        (linear_loss, 4096, {"z_loss": 1e-4}, 3 * PRODUCT + SUMS + GRADIENT),
        (linear_loss, 16_384, {}, 3 * PRODUCT + SUMS + GRADIENT),  # some logits are computed twice
        (entropy_loss, 4096, {}, 3 * PRODUCT + (SUMS + 8 + 12 + 4) + (GRADIENT + 8 + 12)),
        (logits_loss, 4096, {}, SUMS + GRADIENT + 4),  # and the sign of what arrives, in 16 bits
    ],
)
@pytest.mark.parametrize("cann", [(9, 0), (9, 1)])
def test_a_logit_moves_as_many_bytes_as_its_passes_take(
    kernel: ModuleType, monkeypatch, loss, tokens, options, passes, cann
) -> None:
    """In bfloat16, to 1%; hidden states are short, so that they and the weight are a few hundredths of a logit.

    On CANN 9.1 an operator has the sums with the logits, where they are those of the head. Of 16,384 tokens three of
    eight pieces are kept: logits of the others are written once more. Entropies multiply twice, before and behind.
    """
    monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.head_logits"), "CANN", cann)
    if cann == (9, 1) and loss is linear_loss:
        passes -= SUMS
    if tokens == 16_384:
        passes += PRODUCT * 5 / 8
    with torch._subclasses.FakeTensorMode(), Cost() as cost:
        loss(kernel, tokens, **options).backward()
    found = sum(cost.bytes.values()) / (tokens * WORDS)
    assert found == pytest.approx(passes, rel=0.01), cost.bytes.most_common(12)


class Recorded(TorchDispatchMode):
    """What is called while the context is open: names of operators, with the dtypes of tensors they take."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.calls = elements, set[tuple[str, tuple[torch.dtype, ...]]]()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = tensors((args, kwargs))
        if any(tensor.numel() >= self.elements for tensor in given):
            self.calls.add((operator.overloadpacket.__name__, tuple(tensor.dtype for tensor in given)))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"softcap": 5.0}, {"pieces": 2}])
def test_no_call_over_logits_hides_a_pass(kernel: ModuleType, monkeypatch, options) -> None:
    """``logsumexp`` copies them, ``sub`` casts 16 bits before they meet 32, and ``scatter_`` passes over whole rows."""
    monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.head_logits"), "CANN", (9, 0))
    drawn = draw(24, 96, 8)
    own = leaves(drawn[:2], torch.bfloat16, "npu")
    shared = {name: value for name, value in options.items() if name != "pieces"}
    with Recorded(12 * 48) as recorded:
        kernel.linear_cross_entropy(*own, drawn.labels.npu(), **options).backward()
        kernel.linear_log_probs_and_entropy(*own, drawn.labels.npu())[1].sum().backward()
        kernel.cross_entropy((own[0] @ own[1].T).detach().requires_grad_(), drawn.labels.npu(), **shared).backward()
    assert not {"logsumexp", "scatter_", "scatter"}.intersection(name for name, _ in recorded.calls)
    assert not [call for call in recorded.calls if call[0] in ("sub", "sub_") and len(set(call[1])) > 1]
    assert "npu_scatter_nd_update_" in {name for name, _ in recorded.calls}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [None, 3])
def test_words_that_are_left_out_change_nothing_for_the_others(kernel: ModuleType, dtype, pieces) -> None:
    """Of a bias that is -inf for all words of a piece, and for the last word of the others: as if they were not there.

    To the rounding of sums in float32 in another order, and of the gradients: the others' logits are the same. They are
    up to 10 in size, with steps of 2^-20 in float32.
    """
    drawn, left_out = draw(24, 300, 8, seed=3, bias=True, ignored=0.0), torch.zeros(300, dtype=torch.bool)
    left_out[100:200] = left_out[99] = left_out[299] = True  # of three pieces of 100
    words = (~left_out).nonzero().squeeze(1)
    labels = words[drawn.labels % len(words)]
    results = []
    for taken, bias, wanted in (
        (torch.arange(300), drawn.bias.masked_fill(left_out, -torch.inf), labels),
        (words, drawn.bias, torch.searchsorted(words, labels)),
    ):
        own = leaves([drawn.hidden_states, drawn.weight[taken], bias[taken]], dtype, "npu")
        rows = kernel.linear_cross_entropy(own[0], own[1], wanted.npu(), own[2], reduction="none", pieces=pieces)
        rows.sum().backward()
        results.append([t.detach().cpu().double() for t in (rows, own[0].grad, own[1].grad)])
    (rows, d_hidden, d_weight), (fewer, d_fewer, d_weight_fewer) = results
    eps = max(torch.finfo(dtype).eps, 2**-21)
    assert (rows - fewer).abs().max() <= 2**-20 * fewer.abs().max()
    assert (d_hidden - d_fewer).abs().max() <= 2 * eps * d_fewer.abs().max()
    assert (d_weight[words] - d_weight_fewer).abs().max() <= 2 * eps * d_weight_fewer.abs().max()
    assert not d_weight[left_out].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["npu", "cpu"])
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_word_of_each_row_is_written_and_nothing_else(kernel: ModuleType, dtype, device, is_strided) -> None:
    label_scatter = import_module(f"{kernel.__name__}.ops.label_scatter")
    x = torch.arange(5 * 14, dtype=dtype).view(5, 14)
    words, values = torch.tensor([[0], [6], [3], [6], [0]]), -torch.arange(1, 6, dtype=dtype).unsqueeze(1)
    expected = (x[:, ::2] if is_strided else x[:, :7].contiguous()).clone().scatter_(1, words, values)
    moved = x.to(device)
    moved = moved[:, ::2] if is_strided else moved[:, :7].contiguous()
    label_scatter.write_one_per_row(moved, label_scatter.row_and_word(words.to(device)), values.to(device))
    assert torch.equal(moved.cpu(), expected)
