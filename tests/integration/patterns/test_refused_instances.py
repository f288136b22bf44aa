"""Instances of classes that match, and compute what no kernel does: each keeps its forward, and the report says why."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers.activations import AccurateGELUActivation
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP
from transformers.models.xlstm.modeling_xlstm import xLSTMRMSNorm

import kernels_ext_npu
from kernels_ext_npu.patterns.norms import layer_norms
from tests.support.mlp_classes import instance as mlp
from tests.support.router_classes import instance as router

SIZE = 32
BFLOAT16 = torch.bfloat16


def changed(module: nn.Module, **members: object) -> nn.Module:
    for name, value in members.items():
        setattr(module, name, value)
    return module


NOT_SILU = "its activation is not silu"
# how it is made, and how the reason begins
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        f"MLP with {name}": (partial(mlp, LlamaMLP, name), "its activation is ")
        for name in ("relu", "quick_gelu", "tanh")
    },
    **{
        f"{cls.__name__} with gelu": (partial(mlp, cls, "gelu"), NOT_SILU)
        for cls in (DeepseekV4MLP, Glm5NextTextMLP, FalconH1MLP)
    },
    "MLP with a limit": (
        lambda: changed(mlp(Step3p7MLP), limit=16.0),
        "it clamps what its activation gives (limit is 16.0), which no operator",
    ),
    "activation with another constant": (
        lambda: changed(AccurateGELUActivation(), precomputed_constant=0.75),
        "its factor is 0.75, that of the kernel is the root of 2 / pi",
    ),
    "norm with a bias": (lambda: xLSTMRMSNorm(SIZE, use_bias=True), "it adds a bias"),
    "norm without a weight": (lambda: xLSTMRMSNorm(SIZE, use_weight=False), "it has no weight"),
    "norm that squares in its dtype": (
        lambda: xLSTMRMSNorm(SIZE, force_float32_reductions=False),
        "it squares in the dtype of its input, the kernel in float32",
    ),
    "norm over two dimensions": (lambda: nn.RMSNorm((2, 4)), "it norms over 2 dimensions, the kernel over one"),
    "norm without an eps": (lambda: nn.RMSNorm(4), "its eps is None, not a number"),
    "layer norm of two dtypes": (
        lambda: changed(layer_norms.DebertaLayerNorm(SIZE), bias=nn.Parameter(torch.zeros(SIZE, dtype=BFLOAT16))),
        "its weight is torch.float32 and its bias torch.bfloat16",
    ),
    "sum with another norm": (
        lambda: changed(layer_norms.BertSelfOutput(SIZE), LayerNorm=nn.Identity()),
        "its norm is a torch.nn.modules.linear.Identity",
    ),
    "router with groups": (lambda: router(AXK2TopkRouter, n_group=2), "it fills groups that are not chosen with 0"),
    "router in bfloat16": (
        lambda: router(Mistral4TopkRouter).to(BFLOAT16),
        "it compares probabilities that are rounded to torch.bfloat16",
    ),
    "router with a method": (
        lambda: router(DeepseekV2TopkRouter, topk_method="noaux_tc"),
        "its topk_method is noaux_tc",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_keeps_its_forward_and_says_why(registered, name: str) -> None:
    make, reason = REFUSED[name]
    model = nn.ModuleDict({"module": make(), "projection": nn.Linear(2, 2)}).to("npu")  # which is on a device for sure
    row, *_ = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert not row.swapped
    assert row.reason.startswith(reason)
