"""What the release of CANN that the software device stands for refuses, with the words of its tiling where known."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_npu import npu_rms_norm
from torch_npu.npu import utils
from torch_npu.utils.collect_env import get_cann_version

import softnpu
from softnpu.cann import CANN
from softnpu.formulas.grouped_matmul_limits import require_offsets_of_sums
from softnpu.runtime import cann_version
from tests.softnpu.expert_refusals import init, parts, slots, top_k, unpermute_grad
from tests.softnpu.given import fp16, half, index, npu

pytestmark = pytest.mark.software
NEVER = (99, 0)


def mrope(heads: int, size: int = 128) -> None:
    x, table = fp16(1, heads * size), fp16(1, size)
    torch.ops.npu.npu_mrope(index(0), x, x[:, :size], table, size)


def rotary(*shape: int, rotary_mode: str = "half") -> None:
    cos = npu(shape[0], *[1] * (len(shape) - 2), shape[-1])
    torch.ops.npu.npu_rotary_mul(npu(*shape), cos, cos, rotary_mode)


def rotary_gradient(sequences: int, positions: int) -> None:
    grad, cos = npu(sequences, 2, positions, 64), npu(sequences, 1, positions, 64)
    torch.ops.npu.npu_rotary_mul_backward(grad, grad, cos, cos, "half")


def gating(experts: int = 256, k: int = 8, **options: object) -> None:
    groups = {"k_group": 4, "group_count": 8, "group_select_mode": 1, "norm_type": 1}
    top_k(npu(2, experts), k, bias=npu(experts), **groups, **options)


def captured_gelu() -> None:
    x = npu(4)
    with torch.npu.graph(torch.npu.NPUGraph()):
        torch.ops.npu.npu_fast_gelu(x)


def packed_gradient(size: int, before: int, behind: int) -> None:
    x = npu(3, 1, size).requires_grad_()
    mask = npu(2048, 2048).bool().triu(1)
    out = torch.ops.npu.npu_fusion_attention(
        x, x, x, 1, "TND", None, None, mask, 1.0, 1.0, before, behind, 0, None, [3], [3], 4
    )[0]
    out.backward(torch.ones_like(out))


def latents(heads: int = 32, *, in_pages: bool = True, masked: bool = False) -> None:
    key, key_rope = half(2, 1, 16, 512), half(2, 1, 16, 64)
    pages = (
        {"block_table": index([0], [1], dtype=torch.int32), "block_size": 16, "actual_seq_lengths_kv": [16, 9]}
        if in_pages
        else {}
    )
    if masked:
        pages["atten_mask"] = npu(2, 1, 1, 16).bool()
    torch.ops.npu.npu_fused_infer_attention_score(
        half(2, heads, 1, 512), key, key, query_rope=half(2, heads, 1, 64), key_rope=key_rope, num_heads=heads,
        num_key_value_heads=1, input_layout="BNSD", **pages,
    )  # fmt: skip


def sums_fit(*rows: int) -> None:
    """Ask for the limit itself: sums so long take 17 GB."""
    require_offsets_of_sums("npu_grouped_matmul", rows, 4096)


def norms_gradient(gamma: Tensor) -> None:
    torch.ops.npu.npu_rms_norm_backward(half(2, 8), half(2, 8), gamma, npu(2, 1))


# a call, since which release it is taken, and the words of a refusal
CALLS: dict[str, tuple[Callable[[], None], tuple[int, int], str]] = {
    "42 heads of 128": (lambda: mrope(42), (8, 2), ""),
    "43 heads of 128": (lambda: mrope(43), (8, 5), "SIGFPE"),
    "53 heads of 128": (lambda: mrope(53), (8, 5), "SIGFPE"),
    "54 heads of 128": (lambda: mrope(54), (9, 0), "SIGFPE"),
    "56 heads of 96": (lambda: mrope(56, 96), (8, 2), ""),
    "57 heads of 96": (lambda: mrope(57, 96), (8, 5), "SIGFPE"),
    "85 heads of 64": (lambda: mrope(85, 64), (8, 2), ""),
    "86 heads of 64": (lambda: mrope(86, 64), (8, 5), "SIGFPE"),
    "tokens": (lambda: rotary(9, 2, 64), (8, 5), "must be 4-dimensional"),
    "tokens in pairs": (lambda: rotary(9, 2, 64, rotary_mode="interleave"), (8, 5), "must be 4-dimensional"),
    "nothing to broadcast": (lambda: rotary(16, 1, 1, 64), (8, 2), ""),  # and so no rule of BNSD
    "8 sequences of 9": (lambda: rotary_gradient(8, 9), (8, 2), ""),
    "8 sequences of 8": (lambda: rotary_gradient(8, 8), NEVER, r"invalid shape! x shape: \[8, 2, 8, 64\]"),
    "33 experts chosen": (lambda: gating(k=33), (8, 3), "k up to 32"),
    "128 experts": (lambda: gating(128), (8, 3), "256 experts"),
    "scores": (lambda: gating(out_flag=True), (8, 3), "no out_flag"),
    "a captured fast GELU": (captured_gelu, (8, 5), "Cannot run aclop operators during NPU graph capture"),
    "heads of 512": (lambda: packed_gradient(512, 1, 0), (8, 2), ""),
    "heads of 520": (lambda: packed_gradient(520, 1, 0), (8, 5), "D is 1 to 512"),
    "latents in pages": (latents, (8, 2), ""),
    "latents that lie in no pages": (lambda: latents(in_pages=False), (8, 5), "have to lie in pages"),
    "latents of 16 heads": (lambda: latents(16), (8, 5), "32, 64 or 128 heads"),
    "a mask of latents": (lambda: latents(masked=True), (8, 5), "one query without a mask"),
    "sums of groups": (parts, (8, 3), "group_type currently only support -1 and 0"),
    "a long sum before another": (lambda: sums_fit(2**20, 1), (9, 1), "fewer than 2..32 elements before the last"),
    "a long sum behind another": (lambda: sums_fit(1, 2**20), (8, 2), ""),
    "rows of experts, not said how many": (
        lambda: init(quant_mode=-1, active_expert_range=[0, 5]),
        (9, 0),
        "active_num must be all 4 rows",
    ),
    "experts of equally many rows": (
        lambda: init(quant_mode=-1, drop_pad_mode=1, expert_capacity=1, active_num=4),
        (9, 0),
        "drop_pad_mode currently support 0",
    ),
    "weights of float32": (
        lambda: unpermute_grad(half(4, 8), half(2, 8), slots(4), npu(2, 2)),
        (9, 0),
        "grad_probs has the dtype of the rows",
    ),
    "gamma of float32": (lambda: npu_rms_norm(half(2, 8), npu(8)), (8, 3), "gamma must have the dtype of x"),
    "gradient of float32": (lambda: norms_gradient(npu(8)), (8, 3), "gamma must have the dtype of x"),
    "a single key": (lambda: packed_gradient(64, 0, 0), NEVER, "pre_token and next_token is invalid"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_release_refuses_what_it_does_not_take(name: str) -> None:
    call, since, words = CALLS[name]
    if since <= CANN:
        call()
        return
    with pytest.raises(RuntimeError, match=words) as error:
        call()
    assert since == NEVER or f"(CANN {CANN[0]}.{CANN[1]}" in str(error.value)


def test_the_release_is_what_torch_says() -> None:
    assert torch.version.cann.startswith(f"{CANN[0]}.{CANN[1]}")
    assert get_cann_version() == utils.get_cann_version() == cann_version()
    assert utils._is_gte_cann_version("8.1.RC1")
    assert not utils._is_gte_cann_version("9.9.0")
    assert softnpu.is_software()
