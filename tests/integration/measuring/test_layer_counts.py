"""How many operators a vision tower, an encoder and CLIP launch, with the kernels of their layers and without."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import BertConfig, BertForMaskedLM, CLIPConfig, CLIPModel, PreTrainedModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import kernels_ext_npu
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count
from kernels_ext_npu.measuring import roofline

# ---- at real sizes, on fake tensors, with all kernels ----------------------------------------------------------------
IMAGE = torch.tensor([[1, 32, 32]])  # 1,024 patches, 448 pixels a side
SENTENCES = {tokens: (torch.arange(tokens) % 1000).expand(8, tokens).contiguous() for tokens in (77, 512)}
# https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct, vision_config: eight of its 32 layers, one of which sees all
QWEN2_5_VL_7B = {"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
Made = tuple[PreTrainedModel, dict[str, Tensor]]


def fake(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="npu")


def sentences(values: KnownValues, tokens: int) -> Tensor:
    return values.learn(torch.empty(8, tokens, dtype=torch.long, device="npu"), SENTENCES[tokens])


def tower(values: KnownValues) -> Made:
    model = Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(**QWEN2_5_VL_7B), dtype=BF16)
    grid = values.learn(torch.empty(1, 3, dtype=torch.long, device="npu"), IMAGE)
    return model, {"hidden_states": fake(1024, 1176), "grid_thw": grid}


def bert_base(values: KnownValues) -> Made:
    return BertForMaskedLM._from_config(BertConfig(), dtype=BF16), {"input_ids": sentences(values, 512)}


def clip_base(values: KnownValues) -> Made:
    inputs = {"input_ids": sentences(values, 77), "pixel_values": fake(8, 3, 224, 224)}
    return CLIPModel._from_config(CLIPConfig(), dtype=BF16), inputs


BF16 = torch.bfloat16
# launches of a forward and of a step, and waits of either: of transformers', and at most with kernels
REAL_SIZES: dict[Callable[[KnownValues], Made], tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    tower: ((605, 1331, 29), (168, 430, 7)),
    bert_base: ((167, 581, 0), (131, 509, 0)),
    # its patches are one product with a copy of the pixels and one of the result, in place of a convolution
    clip_base: ((413, 1255, 0), (319, 994, 0)),
}


def real_counts(make: Callable[[KnownValues], Made], is_swapped: bool) -> tuple[int, int, int]:
    values, soc = KnownValues(), roofline.SOCS["910b"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        with Counting(values, soc), torch.device("npu"):
            model, inputs = make(values)
        if is_swapped:
            kernels_ext_npu.kernelize(model)
        forward, step = (count(phase, model, inputs, values, soc) for phase in ("forward", "step"))
    assert forward.waits == step.waits
    for name, counts in (("forward", forward), ("training step", step)):
        gigabytes = counts.bytes.total() / 1e9
        print(f"{make.__name__}, {name}: {counts.launches.total()} launches, {gigabytes:.1f} GB, {counts.waits} waits")
    return forward.launches.total(), step.launches.total(), forward.waits


@pytest.mark.parametrize(
    "make",
    [tower, *(pytest.param(make, marks=pytest.mark.long) for make in (bert_base, clip_base))],
    ids=lambda make: make.__name__,
)
def test_a_tower_and_encoders_launch_less_at_real_sizes(make) -> None:
    before, after = REAL_SIZES[make]
    assert real_counts(make, is_swapped=False) == before
    kernels_ext_npu.register()
    try:
        found = real_counts(make, is_swapped=True)
    finally:
        kernels_ext_npu.unregister()
    assert all(ours <= limit for ours, limit in zip(found, after))
