"""Count on fake tensors what a forward and backward of a model costs."""

import torch
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels_ext_npu.measuring.costs import Cost


def fake_model(model_type: str, **sizes: int) -> PreTrainedModel:
    """Make a bfloat16 model on the NPU that takes no memory; inside a FakeTensorMode."""
    with torch.device("npu"):
        config = AutoConfig.for_model(model_type, dtype="bfloat16", **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def costs(prepare, model_type: str, tokens: int, **sizes: int) -> tuple[Cost, Cost]:
    """Count a forward without gradients, and a forward and backward, of a model that was prepared."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(model_type, **sizes)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="npu")
        prepare(model.eval())
        with torch.no_grad(), Cost() as forward:
            model(ids, use_cache=False)
        prepare(model.train())
        with Cost() as training:
            model(ids, use_cache=False).logits.sum().backward()
    return forward, training
