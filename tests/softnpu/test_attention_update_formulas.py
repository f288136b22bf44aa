"""npu_ring_attention_update: attention over two halves of the keys is the attention over all."""

import torch
import torch_npu

from tests.softnpu.exact_attention import drawn

SHAPES = (5, 1, 32), (8, 1, 32), (8, 1, 32)


def test_two_halves_of_the_keys_make_one_attention() -> None:
    q, k, v = (t.to("npu") for t in drawn(*SHAPES))
    whole = torch_npu.npu_fusion_attention(q, k, v, 2, "SBH", scale=0.3)[:3]
    halves = [torch_npu.npu_fusion_attention(q, *part, 2, "SBH", scale=0.3)[:3] for part in zip(k.chunk(2), v.chunk(2))]
    for found, expected in zip(torch_npu.npu_ring_attention_update(*halves[0], *halves[1]), whole):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)  # float32 sums of 8


def test_several_sequences() -> None:
    q, k, v = (t.view(-1, 2, 16).to("npu") for t in drawn(*SHAPES))
    options = {"scale": 0.3, "softmax_layout": "TND", "actual_seq_qlen": [2, 4]}

    def attention(chosen: list[int], ends: list[int]):
        return torch_npu.npu_fusion_attention(q, k[chosen], v[chosen], 2, "TND", actual_seq_kvlen=ends, **options)[:3]

    whole = attention(list(range(8)), [4, 8])
    halves = [attention([0, 1, 4, 5], [2, 4]), attention([2, 3, 6, 7], [2, 4])]
    found = torch_npu.npu_ring_attention_update(
        *halves[0], *halves[1], actual_seq_qlen=torch.tensor([2, 4]).to("npu"), input_layout="TND",
        input_softmax_layout="TND",
    )  # fmt: skip
    for a, b in zip(found, whole):
        torch.testing.assert_close(a[:4], b[:4], rtol=2e-6, atol=2e-6)
        assert a[4:].isnan().all()  # nobody writes behind the last sequence
