"""What the release of CANN that the software device stands for refuses, with the words of its tiling where known."""

from collections.abc import Callable

import pytest
import torch

import softnpu
from softnpu.cann import CANN

pytestmark = pytest.mark.software
NEVER = (99, 0)


def mrope(heads: int, size: int = 128, dtype: torch.dtype = torch.float16) -> None:
    x = torch.ones(1, heads * size, dtype=dtype, device="npu")
    table = torch.ones(1, size, dtype=dtype, device="npu")
    torch.ops.npu.npu_mrope(torch.zeros(1, dtype=torch.int64, device="npu"), x, x[:, :size], table, size)


def rotary(*shape: int, rotary_mode: str = "half") -> None:
    x, cos = torch.ones(*shape, device="npu"), torch.ones(shape[0], *[1] * (len(shape) - 2), shape[-1], device="npu")
    torch.ops.npu.npu_rotary_mul(x, cos, cos, rotary_mode)


def rotary_gradient(sequences: int, positions: int) -> None:
    grad = torch.ones(sequences, 2, positions, 64, device="npu")
    cos = torch.ones(sequences, 1, positions, 64, device="npu")
    torch.ops.npu.npu_rotary_mul_backward(grad, grad, cos, cos, "half")


def gating(experts: int = 256, k: int = 8, **options: object) -> None:
    x = torch.ones(2, experts, device="npu")
    given = {"bias": x[0], "k_group": 4, "group_count": 8, "group_select_mode": 1, "norm_type": 1, **options}
    torch.ops.npu.npu_moe_gating_top_k(x, k, **given)


def captured_gelu() -> None:
    x = torch.ones(4, device="npu")
    with torch.npu.graph(torch.npu.NPUGraph()):
        torch.ops.npu.npu_fast_gelu(x)


def packed_gradient(size: int, before: int, behind: int) -> None:
    x = torch.ones(3, 1, size, device="npu").requires_grad_()
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    out = torch.ops.npu.npu_fusion_attention(
        x, x, x, 1, "TND", None, None, mask, 1.0, 1.0, before, behind, 0, None, [3], [3], 4
    )[0]
    out.backward(torch.ones_like(out))


def summed_groups() -> None:
    x, ends = torch.ones(3, 4, device="npu"), torch.tensor([1, 3], device="npu")
    torch.ops.npu.npu_grouped_matmul([x.t()], [x], group_list=ends, split_item=3, group_type=2)


def added_groups() -> None:
    x, total = torch.ones(3, 4, dtype=torch.float16, device="npu"), torch.zeros(8, 4, device="npu")
    torch.ops.npu.npu_grouped_matmul_add_(total, x, x, torch.tensor([1, 3], device="npu"))


def routed(**options: int) -> None:
    x, experts = torch.ones(4, 8, device="npu"), torch.ones(4, 1, dtype=torch.int32, device="npu")
    counting = {"expert_num": 2, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    given = {**counting, "quant_mode": -1, "active_expert_range": [0, 2], **options}
    torch.ops.npu.npu_moe_init_routing_v2(x, experts, **given)


def unpermuted_gradient(weights: torch.dtype) -> None:
    rows, order = torch.ones(4, 8, dtype=torch.bfloat16, device="npu"), torch.arange(4, dtype=torch.int32).npu()
    probs = torch.ones(2, 2, dtype=weights, device="npu")
    torch.ops.npu.npu_moe_token_unpermute_grad(rows, rows[:2], order, probs)


def normed(gamma: torch.dtype, backward: bool = False) -> None:
    x, gamma = torch.ones(2, 8, dtype=torch.bfloat16, device="npu"), torch.ones(8, dtype=gamma, device="npu")
    if backward:
        torch.ops.npu.npu_rms_norm_backward(x, x, gamma, torch.ones(2, 1, device="npu"))
    else:
        torch.ops.npu.npu_rms_norm(x, gamma)


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
    "DeepSeek-V3": (gating, (8, 2), ""),
    "33 experts chosen": (lambda: gating(k=33), (8, 3), "k up to 32"),
    "128 experts": (lambda: gating(128), (8, 3), "256 experts"),
    "scores": (lambda: gating(out_flag=True), (8, 3), "no out_flag"),
    "a captured fast GELU": (captured_gelu, (8, 5), "Cannot run aclop operators during NPU graph capture"),
    "heads of 512": (lambda: packed_gradient(512, 1, 0), (8, 2), ""),
    "heads of 520": (lambda: packed_gradient(520, 1, 0), (8, 5), "D is 1 to 512"),
    "sums of groups": (summed_groups, (8, 3), "group_type currently only support -1 and 0"),
    "sums of groups, added": (added_groups, (8, 2), ""),
    "all rows of experts": (lambda: routed(active_num=4), (8, 2), ""),
    "rows of experts, not said how many": (routed, (9, 0), "active_num must be all 4 rows"),
    "weights like rows": (lambda: unpermuted_gradient(torch.bfloat16), (8, 2), ""),
    "weights of float32": (lambda: unpermuted_gradient(torch.float32), (9, 0), "grad_probs has the dtype of the rows"),
    "gamma like x": (lambda: normed(torch.bfloat16), (8, 2), ""),
    "gamma of float32": (lambda: normed(torch.float32), (8, 3), "gamma must have the dtype of x"),
    "gradient of float32": (lambda: normed(torch.float32, True), (8, 3), "gamma must have the dtype of x"),
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
    assert softnpu.is_software()
