"""At the sizes of real models, counted on fake tensors: one launch a tensor, and no copy of q or k."""

from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels_ext_npu.measuring.costs import Cost

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("batch", "positions"), [(1, 4096), (32, 1), (64, 2048)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("layer", "heads", "head_size", "width", "table", "others"),
    [
        ("RotaryPosEmb", (32, 8), 128, 128, BFLOAT16, {}),  # Qwen3-8B
        ("RotaryPosEmb", (8, 1), 256, 256, BFLOAT16, {}),  # Gemma-2B
        ("RotaryPosEmbHalfWidth", (64, 8), 64, 32, BFLOAT16, {"cat": 2}),  # gpt-oss: cos and sin
        ("RotaryPosEmbCastBack", (32, 8), 128, 128, FLOAT32, {"_to_copy": 4}),  # Olmo 2: to float32 and back
        ("RotaryPosEmbPartial", (32, 8), 128, 96, BFLOAT16, {"cat": 2}),  # Phi-4-mini: what passes through
        ("RotaryPosEmbDeinterleaved", (128, 1), 64, 64, BFLOAT16, {"cat": 4}),  # DeepSeek-V3: halves, cos and sin
    ],
)
def test_one_launch_each(
    kernel: ModuleType, layer, heads, head_size, width, table, others, batch, positions, shared
) -> None:
    rows = 1 if shared else batch
    with FakeTensorMode(), torch.no_grad(), torch.device("npu"):
        q, k = (torch.empty(batch, positions, n, head_size, dtype=BFLOAT16).transpose(1, 2) for n in heads)
        cos, sin = (torch.empty(rows, positions, width, dtype=table) for _ in range(2))
        with Cost() as cost:
            getattr(kernel.layers, layer)()(q, k, cos, sin)
    assert cost.launches == {"npu_rotary_mul": 2} | others


def test_a_vision_tower_in_its_own_dtype(kernel: ModuleType) -> None:
    """Qwen2.5-VL: 14308 patches. cos and sin of the same dtype need no float32 copies: the operator has it inside."""
    with FakeTensorMode(), torch.no_grad(), torch.device("npu"):
        q, cos = torch.empty(14308, 16, 80, dtype=BFLOAT16), torch.empty(14308, 80, dtype=BFLOAT16)
        with Cost() as cost:
            kernel.layers.VisionRotaryPosEmb()(q, q, cos, cos)
    assert cost.launches == {"npu_rotary_mul": 2}
