"""The demo's models in graphs: captured at their very first call, and generating."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import kernels_ext_npu
from kernels_ext_npu import model_configs
from kernels_ext_npu.demo import model_comparison
from tests.support.nearness import assert_each_near

# Both are float32, with sums in another order: the demo's own tolerance.
assert_close = partial(assert_each_near, tolerance=1e-5)
QUICK = {"Qwen3", "gpt-oss"}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in model_configs.TINY]

pytestmark = pytest.mark.usefixtures("registered")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = model_configs.config(name)
    return model_comparison.loader(config).from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_first_call_prepares_is_lost_in_a_graph(name: str) -> None:
    """What is kept of a captured call holds nothing until a replay: later calls would find that."""
    model = build(name)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu"))
    ids = [torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected = [model(one, use_cache=False).logits for one in ids]
    given, graph = ids[0].npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = ours(given, use_cache=False).logits
    assert_close(ours(ids[0].npu(), use_cache=False).logits, expected[0])
    for one, other in zip(ids, expected):
        given.copy_(one)
        graph.replay()
        assert_close(captured, other)
    assert_close(ours(ids[1].npu(), use_cache=False).logits, expected[1])
