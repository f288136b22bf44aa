"""Weights that are computed when they are read, as spectral norms and observers do: only a forward computes them.

Whoever looks at a model, to swap, to report or to put back, must not: in training a read takes a step of the user's
state, such as the power iteration of a spectral norm.
"""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kernels_ext_npu
from tests.support.attention_models import on_npu
from tests.support.sparse_models import made


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


# with norms, MLPs, routers, experts and heads, among them those that read a dtype or a size of a weight
NAMES = [
    "t5", "qwen3_moe", "mixtral", "cohere", "granite", "bamba", "gemma4_text", "bitnet", "dbrx", "llama4_text",
    "qwen3_5_text", "Mistral4ForCausalLM",
]  # fmt: skip


@pytest.mark.parametrize("is_swapped_first", [True, False], ids=["swapped first", "parametrized first"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_computed_weights_are_computed_by_forwards_alone_and_as_often_as_without_kernels(
    registered, name: str, is_swapped_first: bool
) -> None:
    plain = made(name)[0].train()
    model = copy.deepcopy(plain).to("npu")
    inputs = {"input_ids": torch.arange(2, 20).view(2, 9)}
    if name == "t5":
        inputs |= {"decoder_input_ids": inputs["input_ids"]}
    expected = count_reads(plain)
    plain(**inputs)
    if name == "t5":  # whose own norms read their weight once more, for its dtype
        expected.subtract(path for path in expected if path.endswith("norm.weight"))
    if is_swapped_first:
        kernels_ext_npu.kernelize(model)
    found = count_reads(model)
    look(model)
    assert not found
    model(**on_npu(inputs))
    assert found == expected
