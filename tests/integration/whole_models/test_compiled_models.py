"""torch.compile: kernelized models are one graph, in inference and training, for sequences of any length.

Values and gradients are those of the CPU without kernels. Attention is transformers' "eager" where lengths change:
what torch_npu makes of SDPA reads them as numbers, so that every length has a graph, with kernels or without.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
from tests.support import nearness, zoo
from tests.support.nearness import TOLERANCE, assert_gradients_near, assert_near
from tests.support.served import kernelized

LENGTHS = 9, 13, 21
LONG = ["gpt_oss", "phi3", "glm4", "cohere", "mixtral", "deepseek_v3", "qwen3_next"]


@pytest.fixture(autouse=True)
def one_graph(registered: None) -> Iterator[None]:
    """Raises where anything is compiled a second time."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def build(name: str, device: str, layers: int | None = None) -> nn.Module:
    """With some of its layers, or all."""
    model = zoo.build(name)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    return kernels_ext_npu.kernelize(model.to(device)) if device == "npu" else model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)


def logits(model: nn.Module, name: str, length: int) -> Tensor:
    return model(**zoo.inputs(name, original(model), length=length), use_cache=False).logits


def gradients(model: nn.Module, name: str, length: int) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    logits(model, name, length).square().mean().backward()
    return nearness.gradients(original(model))


def original(model: nn.Module) -> nn.Module:
    """The model in one that is compiled."""
    return getattr(model, "_orig_mod", model)


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma3_text", 1),
        *(pytest.param(name, None, marks=pytest.mark.long) for name in ["gemma3_text", "llama", *LONG]),
    ],
)
def test_a_model_is_one_graph_for_all_lengths(name: str, layers: int | None, trains: bool) -> None:
    """Norms of heads, as views that are not contiguous, in Gemma 3."""
    model, reference = build(name, "npu", layers), build(name, "cpu", layers)
    call = compiled(model)
    compute, compare = (gradients, assert_gradients_near) if trains else (logits, assert_near)
    for length in LENGTHS:
        with torch.set_grad_enabled(trains):
            compare(compute(call, name, length), compute(reference, name, length))


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(n, marks=pytest.mark.long) for n in ["qwen3_moe", "phi3"])])
def test_layers_that_are_compiled_by_themselves_share_a_graph(name: str) -> None:
    """What a kernel looks at is the same for all layers and lengths."""
    model, reference = build(name, "npu"), build(name, "cpu")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for length in LENGTHS:
        assert_gradients_near(gradients(model, name, length), gradients(reference, name, length))


@torch.no_grad()
def test_compiled_layers_take_a_mask_that_was_described_outside_of_them() -> None:
    """Padding is described once a forward; the first layer makes the mask, which the others find: two graphs."""
    ids, mask = torch.arange(2, 20).view(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    model, reference = kernelized("qwen3"), zoo.build("qwen3")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        found = model(ids.to("npu"), attention_mask=mask.to("npu")).logits.cpu()
    truth = reference(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], truth[mask.bool()], rtol=0, atol=TOLERANCE)
