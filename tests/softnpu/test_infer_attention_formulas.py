"""The attention operators for inference against attention in float64."""

import math
from functools import partial

import pytest
import torch
import torch_npu

import softnpu
from tests.softnpu.conforming import moved
from tests.softnpu.exact_attention import TRIANGLE, arranged, attend, distance, drawn

SCALE = 0.125
# inputs are bfloat16 or float16; weights and result are rounded to it: a few times 2^-9 and 2^-12
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
exact = partial(attend, scale=SCALE)
ops = torch.ops.npu


def fused(tensors, heads=4, kv_heads=2, layout="BNSD", **options):
    return torch_npu.npu_fused_infer_attention_score(
        *(t.to("npu") for t in tensors), num_heads=heads, num_key_value_heads=kv_heads, input_layout=layout,
        scale=SCALE, **moved(options, "npu"),
    )  # fmt: skip


def close(found, expected, dtype=torch.bfloat16) -> None:
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", ["none", "window", "all", "left up", "right down", "band", "pse"])
def test_several_queries(dtype, mode) -> None:
    tensors = drawn((2, 4, 3, 64), (2, 2, 5, 64), (2, 2, 5, 64), dtype=dtype)
    far, shifted, some = distance(3, 5), distance(3, 5, 2), torch.rand(2, 1, 3, 5) < 0.4
    some[..., 0] = False
    bias = torch.randn(1, 4, 3, 5).to(dtype) if mode == "pse" else 0
    causal, near = {"atten_mask": TRIANGLE}, {"pre_tokens": 1, "next_tokens": 0}
    options, hidden = {
        "none": ({}, None),
        # the window leaves positions out that the mask does not
        "window": (near | {"atten_mask": far > 2}, (far > 0) | (far < -1)),
        "all": ({"atten_mask": some, "sparse_mode": 1}, some),
        "left up": (causal | {"sparse_mode": 2}, far > 0),
        "right down": (causal | {"sparse_mode": 3}, shifted > 0),
        "band": (causal | near | {"sparse_mode": 4}, (shifted > 0) | (shifted < -1)),
        "pse": ({"pse_shift": bias}, None),
    }[mode]
    out, lse = fused(tensors, softmax_lse_flag=True, **options)
    expected, sums = exact(*tensors, hidden, behind=bias)
    close(out, expected, dtype)
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=1e-5, atol=1e-5)  # float32 throughout


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD_BSND", "BSH_BNSD", "BSND_NBSD"])
def test_layouts_and_lengths(layout) -> None:
    q, k, v = drawn((2, 4, 3, 64), (2, 2, 5, 64), (2, 2, 5, 64), dtype=torch.bfloat16)
    of_input, _, of_result = layout.partition("_")

    out, lse = fused(
        [arranged(t, of_input) for t in (q, k, v)],
        layout=layout,
        actual_seq_lengths=[2, 3],
        actual_seq_lengths_kv=[5, 1],
    )
    expected = torch.zeros(2, 4, 3, 64, dtype=torch.float64)  # what lengths leave out is filled with zeros
    expected[0, :, :2] = exact(q[0, :, :2], k[0], v[0])[0]
    expected[1] = exact(q[1], k[1, :, :1], v[1, :, :1])[0]
    close(out, arranged(expected, of_result or of_input))
    assert lse.numel() == 0


def test_one_query_over_blocks_of_keys() -> None:
    q, blocks_k, blocks_v = drawn((2, 4, 1, 64), (5, 2, 16, 64), (5, 2, 16, 64), dtype=torch.bfloat16)
    table = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    lengths = [20, 7]
    given = {"actual_seq_lengths_kv": lengths, "block_table": table, "block_size": 16}
    out, _ = fused([q, blocks_k, blocks_v], **given)
    flat = [t.transpose(1, 2).flatten(2).contiguous() for t in (blocks_k, blocks_v)]
    q_bsh = q.transpose(1, 2).flatten(2).contiguous()
    same, _ = fused([q_bsh, *flat], layout="BSH", **given)
    older = torch_npu.npu_incre_flash_attention(
        *(t.to("npu") for t in (q_bsh, *flat)), num_heads=4, num_key_value_heads=2, scale_value=SCALE,
        actual_seq_lengths=lengths, block_table=table.to("npu"), block_size=16,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        k, v = (t[table[i].long()].transpose(0, 1).flatten(1, 2)[:, :length] for t in (blocks_k, blocks_v))
        close(out[i], exact(q[i], k, v)[0])
    assert torch.equal(same.cpu().view(2, 4, 1, 64), out.cpu())
    assert torch.equal(older.cpu(), same.cpu())


def test_latent_attention_scores_the_rotary_parts_beside() -> None:
    q, c, q_rope, k_rope = drawn((2, 8, 1, 512), (2, 1, 6, 512), (2, 8, 1, 64), (2, 1, 6, 64), dtype=torch.bfloat16)
    out, _ = fused([q, c, c], 8, 1, query_rope=q_rope, key_rope=k_rope)
    close(out, exact(torch.cat([q, q_rope], -1), torch.cat([c, k_rope], -1), c)[0])


@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
def test_sequences_behind_each_other_with_a_sink(layout) -> None:
    q, k, v = drawn((6, 4, 64), (7, 2, 64), (7, 2, 64), dtype=torch.bfloat16)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()
    given = [t.transpose(0, 1).contiguous() if layout[0] == "N" else t for t in (q, k, v)]
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *(t.to("npu") for t in given), num_query_heads=4, num_key_value_heads=2, input_layout=layout, sparse_mode=3,
        softmax_scale=SCALE, actual_seq_qlen=[2, 5], actual_seq_kvlen=[3, 7], atten_mask=TRIANGLE.to("npu"),
        learnable_sink=sink.to("npu"), return_softmax_lse=True,
    )  # fmt: skip
    parts = zip(q[:5].split([2, 3]), k.split([3, 4]), v.split([3, 4]))
    found = [
        exact(*(t.transpose(0, 1) for t in part), distance(len(part[0]), len(part[1]), 1) > 0, sink=sink)
        for part in parts
    ]
    close(out[:5], torch.cat([o for o, _ in found], 1).transpose(0, 1))
    expected = torch.cat([s for _, s in found], 1).transpose(0, 1)
    torch.testing.assert_close(lse[:5].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert out[5:].isnan().all()  # a query that belongs to no sequence


def test_the_mask_of_prompt_attention_is_causal_unless_next_tokens_says_otherwise() -> None:
    q, k, v = drawn((1, 4, 5, 64), (1, 4, 5, 64), (1, 4, 5, 64), dtype=torch.bfloat16)
    given = {"num_heads": 4, "input_layout": "BNSD", "scale_value": SCALE}
    given["atten_mask"] = torch.zeros(5, 5, dtype=torch.bool, device="npu")
    out = torch_npu.npu_prompt_flash_attention(*(t.to("npu") for t in (q, k, v)), **given)
    close(out, exact(q, k, v, distance(5, 5) > 0)[0])
    out = torch_npu.npu_prompt_flash_attention(*(t.to("npu") for t in (q, k, v)), **given, next_tokens=5)
    close(out, exact(q, k, v)[0])


def test_rows_that_see_nothing() -> None:
    tensors = drawn((1, 4, 3, 64), (1, 4, 5, 64), (1, 4, 5, 64), dtype=torch.bfloat16)
    hidden = torch.zeros(1, 3, 5, dtype=torch.bool)
    hidden[0, 1] = True
    out, lse = fused(tensors, 4, 4, atten_mask=hidden, sparse_mode=1, inner_precise=2, softmax_lse_flag=True)
    assert (out[0, :, 1] == 0).all()
    assert (lse[0, :, 1] == math.inf).all()
    with softnpu.poisoned_memory(), pytest.warns(UserWarning, match="nothing to attend to"):
        out, _ = fused(tensors, 4, 4, atten_mask=hidden, sparse_mode=1)
    assert out[0, :, 1].isnan().all()
    assert not out[0, :, 0].isnan().any()


FUSED = {"num_heads": 4, "input_layout": "BSND", "softmax_lse_flag": True}


@pytest.mark.parametrize(
    ("operator", "shaped", "workspace_of", "keys", "options"),
    [
        (ops.npu_fusion_attention_v3, ops._npu_fusion_attention_v3_infer_output,
         ops._npu_fusion_attention_v3_get_max_workspace, 2, {"head_num": 4, "input_layout": "BSND"}),
        (ops.npu_fused_infer_attention_score, ops._npu_fused_infer_attention_score_infer_output,
         ops._npu_fused_infer_attention_score_get_max_workspace, 1, FUSED),
    ],
)  # fmt: skip
def test_results_go_to_the_tensors_of_the_caller(operator, shaped, workspace_of, keys: int, options) -> None:
    x = torch.randn(2, 3, 4, 64, dtype=torch.half).npu()
    out = list(shaped(x, *[x] * keys, **options))
    results = operator.out(x, x, x, **options, workspace=workspace_of(x, x, x, **options), out=out)
    assert all(a is b for a, b in zip(results, out))
    assert all(torch.equal(a, b) for a, b in zip(out, operator(x, x, x, **options)))
    with pytest.raises(RuntimeError, match=r"out\[0\] must be float16 \[2, 3, 4, 64\], got float32 \[3\]"):
        operator.out(x, x, x, **options, out=[torch.empty(3).npu(), *out[1:]])
