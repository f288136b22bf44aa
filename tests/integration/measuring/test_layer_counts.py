"""How many operators a vision tower launches at its real sizes, with the kernels of its layers and without."""

import torch
from torch._subclasses import FakeTensorMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import kernels_ext_npu
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count
from tests.support.costs import SOC

# https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct, vision_config: eight of its 32 layers, one of which sees all
QWEN2_5_VL_7B = {"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
IMAGE = torch.tensor([[1, 32, 32]])  # 1,024 patches, 448 pixels a side


def test_kernels_save_launches_in_a_vision_tower() -> None:
    values, config = KnownValues(), Qwen2_5_VLVisionConfig(**QWEN2_5_VL_7B)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with Counting(values, SOC), torch.device("npu"):
            model = Qwen2_5_VisionTransformerPretrainedModel._from_config(config, dtype=torch.bfloat16)
            grid = values.learn(torch.empty(1, 3, dtype=torch.long), IMAGE)
            inputs = {"hidden_states": torch.empty(1024, 1176, dtype=torch.bfloat16), "grid_thw": grid}

        def figures() -> list[int]:
            """Launches and waits of a forward and of a step."""
            counted = [count(phase, model, inputs, values, SOC) for phase in ("forward", "step")]
            return [figure for counts in counted for figure in (counts.launches.total(), counts.waits)]

        assert figures() == [605, 29, 1331, 29]
        kernels_ext_npu.register()
        kernels_ext_npu.kernelize(model)
        assert all(ours <= limit for ours, limit in zip(figures(), (168, 7, 430, 7)))
