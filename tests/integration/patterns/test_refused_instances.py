"""Instances of classes that match, and compute what no kernel does: each keeps its forward, and the report says why."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers.activations import AccurateGELUActivation
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.beam.modeling_beam import BeamTopKRouter
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense
from transformers.models.xlstm.modeling_xlstm import xLSTMRMSNorm

import kernels_ext_npu
from kernels_ext_npu.selftest.layers import bare_modules
from kernels_ext_npu.selftest.layers.other_releases import MambaRMSNormGated
from tests.fused_moe.router_classes import instance as router
from tests.support import swapped as swapping
from tests.swiglu.mlp_classes import instance as mlp

SIZE = 32
BFLOAT16 = torch.bfloat16


def changed(module: nn.Module, **members: object) -> nn.Module:
    for name, value in members.items():
        setattr(module, name, value)
    return module


def placed(module: nn.Module, name: str) -> nn.Module:
    """Let a property of its class give what a module holds."""
    vars(module)["held"] = getattr(module, name)
    delattr(module, name)
    module.__class__ = type("Placed", (type(module),), {name: property(lambda self: self.held)})
    return module


NOT_SILU = "its activation is not silu"
# what a forward does not read, and its layer does where there is any
UNREAD: dict[type[nn.Module], tuple[Callable[[], nn.Module], dict[str, object]]] = {
    OlmoLayerNorm: (lambda: OlmoLayerNorm(SIZE), {"weight": nn.Parameter(torch.ones(SIZE))}),
    MambaRMSNormGated: (lambda: bare_modules.norm(MambaRMSNormGated, SIZE), {"group_size": 8}),
    MixtralTopKRouter: (lambda: router(MixtralTopKRouter), {"norm_topk_prob": False}),
    BeamTopKRouter: (lambda: router(BeamTopKRouter), {"routed_scaling_factor": 2.0}),
    Lfm2MLP: (lambda: mlp(Lfm2MLP), {"act_fn": nn.GELU()}),
    T5DenseGatedActDense: (lambda: mlp(T5DenseGatedActDense, "silu"), {"gate_proj": nn.Linear(1, 1)}),
    Glm5NextTextMLP: (lambda: mlp(Glm5NextTextMLP), {"limit": 1.0}),
}
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
    "layer norm of two dtypes": (
        lambda: changed(DebertaLayerNorm(SIZE), bias=nn.Parameter(torch.zeros(SIZE, dtype=BFLOAT16))),
        "its weight is torch.float32 and its bias torch.bfloat16",
    ),
    "sum with another norm": (
        lambda: changed(bare_modules.closed_residual(SIZE), LayerNorm=nn.Identity()),
        "its norm is a torch.nn.modules.linear.Identity",
    ),
    "router with groups": (lambda: router(AXK2TopkRouter, n_group=2), "it fills groups that are not chosen with 0"),
    "router in bfloat16": (
        lambda: router(Mistral4TopkRouter).to(BFLOAT16),
        "it compares probabilities that are rounded to torch.bfloat16",
    ),
    "norm of two eps": (
        lambda: changed(nn.RMSNorm(SIZE, 1e-6), variance_epsilon=1.0),
        "its variance_epsilon is 1.0 and its",
    ),
    "norm with another method": (
        lambda: changed(GemmaRMSNorm(SIZE), _norm=torch.square),
        "it was given a _norm of its own",
    ),
    **{
        f"{cls.__name__} with {name}": (
            lambda make=make, members=members: changed(make(), **members),
            f"it has a member {name}",
        )
        for cls, (make, members) in UNREAD.items()
        for name in members
    },
    **{
        f"MLP with a property {name}": (
            lambda name=name: placed(mlp(LlamaMLP), name),
            f"its {name} is no member of the",
        )
        for name in ("act_fn", "up_proj")
    },
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


FLAGS: list[tuple[Callable[[], nn.Module], dict[str, object]]] = [
    (lambda: changed(Gemma4RMSNorm(SIZE), weight=nn.Parameter(torch.zeros(SIZE))), {"with_scale": False}),
    (lambda: bare_modules.norm(Qwen4ExpTextRMSNorm, SIZE), {"group_size": 8}),
    (lambda: xLSTMRMSNorm(SIZE), {"bias": nn.Parameter(torch.ones(SIZE))}),
    (lambda: mlp(Gemma3nTextMLP), {"activation_sparsity": 0.9}),
    (lambda: changed(mlp(Step3p7MLP), limit=float("inf")), {"limit": 0.01}),
    (AccurateGELUActivation, {"precomputed_constant": 0.5}),
]


@pytest.mark.parametrize(("make", "members"), FLAGS, ids=[str(members) for _, members in FLAGS])
def test_what_a_member_changes_after_the_swap_is_computed(registered, make, members) -> None:
    """To 2e-6 of the norm, as float32 rounds."""
    own = make()
    (device,) = swapping.swapped(own)
    x = torch.linspace(-2, 2, 2 * getattr(own, "hidden_size", SIZE)).view(2, -1)
    kept = own(x)
    for module in (own, device):
        changed(module, **copy.deepcopy(members))
    device.to("npu")
    assert not torch.allclose(own(x), kept)
    swapping.assert_agree([device(x.npu())], [own(x)], 2e-6)
    (row,) = [row for row in kernels_ext_npu.report(nn.ModuleDict({"module": device})) if row.path == "module"]
    assert not row.swapped


def test_a_member_that_the_kernel_does_not_find_leaves_it_to_the_class(registered) -> None:
    own = mlp(T5DenseGatedActDense, "silu")
    (device,) = swapping.swapped(own)
    placed(device, "dropout")
    with pytest.warns(UserWarning, match="without its kernel, which refused it: 'dropout'"):
        swapping.assert_agree([device(torch.ones(2, 32).npu())], [own(torch.ones(2, 32))], 2e-6)
