"""Weights that are computed when they are read, as spectral norms and observers do: only a forward computes them.

Whoever looks at a model, to swap, to report or to put back, must not: in training a read takes a step of the user's
state, such as the power iteration of a spectral norm.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

import kernels_ext_npu
from tests.support import router_classes, zoo
from tests.support.programs import variants


class Counting(nn.Module):
    """A parametrization that counts how often its weight is read."""

    def __init__(self, reads: Counter[str], name: str) -> None:
        super().__init__()
        self.reads, self.name = reads, name

    def forward(self, weight: Tensor) -> Tensor:
        self.reads[self.name] += 1
        return weight * 1.0


def count_reads(module: nn.Module) -> Counter[str]:
    """Parametrize everything that a module has; return the counter of reads."""
    reads: Counter[str] = Counter()
    for name, _ in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        parametrize.register_parametrization(module.get_submodule(path), leaf, Counting(reads, name))
    reads.clear()
    return reads


def look(model: nn.Module) -> None:
    """Do all that looks at a model, and calls nothing."""
    kernels_ext_npu.kernelize(model)
    str(kernels_ext_npu.report(model))
    model.eval()
    model.train()
    kernels_ext_npu.restore(model)
    kernels_ext_npu.kernelize(model)


MODELS = ["t5", "mixtral", "cohere", "bamba", "gemma4_text", "bitnet", "dbrx", "llama4_text"]


@pytest.mark.parametrize("name", [*MODELS, "router that is served in one dtype"])
def test_no_look_computes_a_weight(registered, name: str) -> None:
    """Of norms, MLPs, routers, experts and heads, among them those that read a dtype or a size of a weight."""
    router = router_classes.instance(Mistral4TopkRouter)
    model = (zoo.build(name).train() if name in MODELS else nn.ModuleDict({"router": router})).to("npu")
    reads = count_reads(model)
    look(model)
    assert not reads


@pytest.mark.parametrize("name", ["dense with biases", "experts", "linear attention"])
@pytest.mark.parametrize("is_swapped_first", [True, False], ids=["swapped first", "parametrized first"])
def test_a_model_computes_its_weights_as_often_as_without_kernels(
    registered, name: str, is_swapped_first: bool
) -> None:
    plain = variants.make(name).train()
    model = copy.deepcopy(plain).to("npu")
    expected = count_reads(plain)
    call(name, plain)
    if is_swapped_first:
        kernels_ext_npu.kernelize(model)
    found = count_reads(model)
    look(model)
    assert not found
    call(name, model)
    assert found == expected


def call(name: str, model: Any) -> None:
    with torch.no_grad():
        model(**variants.inputs(name, model.device))
