"""torch's own attention on the NPU, called as a function while kernels are registered."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution import sources
from tests.conftest import ROOT
from tests.support import npu_counts, zoo
from tests.support.nearness import assert_near

pytestmark = pytest.mark.usefixtures("registered")
FUSED = "npu_fusion_attention"
LOWEST = torch.finfo(torch.float32).min
# of float32 sums of some dozen products, relative to the norm of the result
ROUNDING = 1e-5


def tensors(heads: int = 4, queries: int = 6, keys: int = 6) -> list[Tensor]:
    """Draw q, k and v of two sequences, ``[2, N, S, 16]``, on the CPU."""
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, 16) for length in (queries, keys, keys)]


def padded_causal(lowest: float = LOWEST, queries: int = 6, keys: int = 6) -> Tensor:
    """The mask ``[2, 1, S_q, S_k]`` of causal sequences, the second of which ends with two tokens of padding."""
    visible = torch.ones(2, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    visible[1, :, :, -2:] = False
    return torch.zeros(2, 1, queries, keys).masked_fill(~visible, lowest)


def fused_launches() -> int:
    """Count launches of the fused operator since the last reset."""
    return sum(count for name, count in npu_counts.read().items() if name.startswith(FUSED) and "grad" not in name)


@pytest.mark.parametrize(
    "mask",
    [
        padded_causal(),
        padded_causal(float("-inf")),
        padded_causal()[:, :, -1:],  # of keys alone, [2, 1, 1, S_k]
        padded_causal()[0, 0],
        padded_causal()[0],
    ],
    ids=["lowest", "infinite", "of keys", "two dimensions", "three dimensions"],
)
def test_a_mask_of_floats_is_computed_by_the_fused_operator(mask: Tensor) -> None:
    inputs = tensors()
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = F.scaled_dot_product_attention(*exact, mask.double().clamp(min=LOWEST), scale=0.3)
    expected.sum().backward()
    ours = [tensor.to("npu").requires_grad_() for tensor in inputs]
    npu_counts.reset()
    found = F.scaled_dot_product_attention(*ours, mask.to("npu"), scale=0.3)
    assert fused_launches() == 1
    found.sum().backward()
    assert_near(found, expected, ROUNDING)
    for mine, theirs in zip(ours, exact):
        assert_near(mine.grad, theirs.grad, 10 * ROUNDING)  # sums of more terms, which cancel in k


@pytest.mark.parametrize("is_on", [False, True], ids=["float32", "autocast"])
def test_the_host_waits_once_for_a_mask_that_all_layers_get(is_on: bool) -> None:
    q, k, v = (tensor.to("npu") for tensor in tensors())
    mask = padded_causal().to("npu")
    npu_counts.reset()
    with torch.autocast("npu", torch.bfloat16, enabled=is_on):
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, mask[:, :, :, : k.shape[2]].expand(-1, 4, -1, -1))
    assert fused_launches() == 3
    assert npu_counts.read()["device_to_host_copies"] == 1


def test_a_mask_that_is_changed_is_read_again() -> None:
    q, k, v = tensors()
    masks = padded_causal(), padded_causal().to("npu")
    for change in (Tensor.clone, Tensor.zero_, lambda mask: mask[0, 0, 3].fill_(1.5), lambda mask: mask[0].zero_()):
        results = []
        for mask in masks:
            change(mask)
            results.append(F.scaled_dot_product_attention(*(t.to(mask.device) for t in (q, k, v)), mask))
        assert_near(*reversed(results), ROUNDING)


def biased(mask: Tensor) -> Tensor:
    """Add a bias that depends on the key."""
    return mask + torch.linspace(-1, 1, mask.shape[-1])


def differing_by_head(mask: Tensor) -> Tensor:
    """Give each head its mask."""
    return mask.expand(-1, 4, -1, -1).clone()


def without_keys(mask: Tensor) -> Tensor:
    """Mask out all keys of a query."""
    mask = mask.clone()
    mask[1, :, 0] = LOWEST
    return mask


@pytest.mark.parametrize(
    "change",
    [biased, differing_by_head, without_keys, lambda mask: mask.clamp(min=-1e4)],
    ids=["bias", "heads", "no key", "-1e4"],
)
def test_what_is_more_than_a_mask_stays_torchs(change: Callable[[Tensor], Tensor]) -> None:
    q, k, v = tensors()
    mask = change(padded_causal())
    npu_counts.reset()
    found = F.scaled_dot_product_attention(*(tensor.to("npu") for tensor in (q, k, v)), mask.to("npu"))
    assert fused_launches() == 0
    assert_near(found, F.scaled_dot_product_attention(q, k, v, mask), ROUNDING)


def test_a_mask_that_learns_has_its_gradient() -> None:
    q, k, v = tensors()
    grads = []
    for device in ("cpu", "npu"):
        mask = padded_causal().to(device).requires_grad_()
        F.scaled_dot_product_attention(*(tensor.to(device) for tensor in (q, k, v)), mask).square().sum().backward()
        grads.append(mask.grad)
    assert_near(grads[1], grads[0], ROUNDING)


def test_heads_of_keys_that_are_shared() -> None:
    q, (k, v) = tensors(heads=4)[0], tensors(heads=2)[1:]
    mask = padded_causal()
    npu_counts.reset()
    found = F.scaled_dot_product_attention(*(t.to("npu") for t in (q, k, v)), mask.to("npu"), enable_gqa=True)
    assert fused_launches() == 1
    assert_near(found, F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), ROUNDING)


def test_a_mask_of_another_size_raises_what_torch_raises() -> None:
    q, k, v = (tensor.to("npu") for tensor in tensors())
    with pytest.raises(RuntimeError, match="size"):
        F.scaled_dot_product_attention(q, k, v, torch.zeros(2, 1, 5, 6, device="npu"))
    with pytest.raises(RuntimeError, match="dtype"):
        F.scaled_dot_product_attention(q, k, v, torch.zeros(2, 1, 6, 6, device="npu", dtype=torch.float16))


@pytest.mark.parametrize("lies_as", ["BNSD", "BSND"])
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()}])
def test_other_calls_are_one_launch_and_no_copy(call: dict, lies_as: str) -> None:
    """Behind it code joins the heads, for which the result is copied where q, k and v lie by head."""
    inputs = tensors() if lies_as == "BNSD" else [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors()]
    expected = F.scaled_dot_product_attention(*inputs, **call).transpose(1, 2).flatten(2)
    ours = [tensor.to("npu") for tensor in inputs]
    call = {name: value.to("npu") if isinstance(value, Tensor) else value for name, value in call.items()}
    for _ in range(2):  # at the first one a mask is made, or inverted
        npu_counts.reset()
        found = F.scaled_dot_product_attention(*ours, **call).transpose(1, 2).flatten(2)
        counts = npu_counts.read()
        assert fused_launches() == 1
        assert_near(found, expected, ROUNDING)
    assert sum(counts.values()) == 1 + (lies_as == "BNSD")


def test_a_causal_mask_of_fewer_queries_begins_at_the_first_key() -> None:
    q, k, v = tensors(queries=3)
    found = F.scaled_dot_product_attention(*(tensor.to("npu") for tensor in (q, k, v)), is_causal=True)
    assert_near(found, F.scaled_dot_product_attention(q, k, v, is_causal=True), ROUNDING)


OF_KEYS = padded_causal()[:, :, -1:]


@pytest.mark.parametrize("is_on", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("queries", [6, 3])
@pytest.mark.parametrize(
    ("mask", "is_fused"),
    [(OF_KEYS == 0, True), (OF_KEYS, True), (OF_KEYS.flip(-1).clamp(min=-32), False), (torch.arange(6.0), False)],
    ids=["boolean", "lowest", "first queries see no key", "bias"],
)
def test_a_mask_of_keys_may_be_causal_too(mask: Tensor, is_fused: bool, queries: int, is_on: bool) -> None:
    """Which torch refuses on the NPU, and computes on the CPU: vision language models mask their padding so."""
    inputs = tensors(queries=queries)
    visible = torch.ones(queries, 6, dtype=torch.bool).tril()
    exact = mask & visible if mask.dtype is torch.bool else mask.double().masked_fill(~visible, -torch.inf)
    npu_counts.reset()
    with torch.autocast("npu", torch.bfloat16, enabled=is_on):
        found = F.scaled_dot_product_attention(*(each.npu() for each in inputs), mask.npu(), is_causal=True)
    assert fused_launches() == is_fused
    expected = F.scaled_dot_product_attention(*(each.double() for each in inputs), exact)
    assert_near(found, expected, 2**-7 if is_on else ROUNDING)  # of inputs in bfloat16


def test_queries_behind_padding_alone_weigh_that_as_on_the_cpu() -> None:
    """The lowest number masks what comes behind them no more than padding."""
    inputs, mask = tensors(), OF_KEYS.flip(-1)
    found = F.scaled_dot_product_attention(*(each.npu() for each in inputs), mask.npu(), is_causal=True)
    assert_near(found, F.scaled_dot_product_attention(*inputs, mask, is_causal=True), ROUNDING)


def test_transforms_of_torch_func() -> None:
    inputs = [torch.stack([tensor, 2 * tensor]) for tensor in tensors()]
    attend = torch.func.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert_near(attend(*(tensor.to("npu") for tensor in inputs)), attend(*inputs), ROUNDING)


def test_tangents_flow_through_a_mask_of_floats_as_without_kernels() -> None:
    q, k, v, change = (each.double() for each in (*tensors(), tensors()[0].flip(0)))
    mask = padded_causal(float("-inf")).double()

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, *(each.to(x) for each in (k, v, mask)))

    step = 1e-6
    expected = (attend(q + step * change) - attend(q - step * change)) / (2 * step)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.float().npu(), change.float().npu())
        assert_near(forward_ad.unpack_dual(attend(dual)).tangent.cpu().double(), expected, ROUNDING)


def test_what_was_traced_follows_a_mask_that_became_a_bias() -> None:
    q, k, v = (each.npu() for each in tensors())
    mask = padded_causal().npu()
    F.scaled_dot_product_attention(q, k, v, mask)  # which reads it
    traced = make_fx(F.scaled_dot_product_attention)(q, k, v, mask)
    bias = torch.randn_like(mask)
    assert_near(traced(q, k, v, bias), F.scaled_dot_product_attention(q, k, v, bias), ROUNDING)


def test_dropout_drops_weights_and_follows_the_seed() -> None:
    q, k, v = (tensor.to("npu") for tensor in tensors())
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(F.scaled_dot_product_attention(q, k, v, padded_causal().to("npu"), dropout_p=0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_after_unregister_it_is_torchs_again() -> None:
    q, k, v = (tensor.to("npu") for tensor in tensors())
    kernels_ext_npu.unregister()
    npu_counts.reset()
    F.scaled_dot_product_attention(q, k, v, padded_causal().to("npu"))
    assert fused_launches() == 0


def test_a_restored_model_launches_what_it_does_without_kernels() -> None:
    model = kernels_ext_npu.restore(kernels_ext_npu.kernelize(zoo.build("qwen3").to("npu")))
    found = []
    for _ in range(2):
        npu_counts.reset()
        model(**zoo.inputs("qwen3", model))
        found.append(npu_counts.read())
        kernels_ext_npu.unregister()
    assert found[0] == found[1]
    assert found[0]["logical_not"] == model.config.num_hidden_layers  # torch_npu inverts the mask in each layer


def test_it_is_left_alone_without_the_kernel_of_attention() -> None:
    kernels_ext_npu.register(kernels=["RMSNorm"])
    q, k, v = (tensor.to("npu") for tensor in tensors())
    npu_counts.reset()
    F.scaled_dot_product_attention(q, k, v, padded_causal().to("npu"))
    assert fused_launches() == 0


def test_a_kernel_that_cannot_be_loaded_is_tried_once(tmp_path: Path, monkeypatch) -> None:
    """As from a Hub that does not answer, which would take its time in every layer."""
    for name in REPOSITORIES:
        (tmp_path / name).symlink_to(ROOT / name)
    kernels_ext_npu.register(source=tmp_path)
    (tmp_path / "FlashAttention").unlink()
    tried, load = [], sources.load_package
    monkeypatch.setattr(sources, "load_package", lambda *args: (tried.append(args), load(*args))[1])

    def causal_counts() -> dict[str, int]:
        q, k, v = tensors(queries=9, keys=9)
        npu_counts.reset()
        found = F.scaled_dot_product_attention(*(tensor.to("npu") for tensor in (q, k, v)), is_causal=True)
        assert_near(found, F.scaled_dot_product_attention(q, k, v, is_causal=True), ROUNDING)
        return npu_counts.read()

    assert all("ones" in causal_counts() for _ in range(3))  # torch_npu makes the mask of each call
    assert len(tried) == 1
    (tmp_path / "FlashAttention").symlink_to(ROOT / "FlashAttention")
    kernels_ext_npu.kernelize(nn.Linear(2, 2, device="npu"))  # which tries again
    assert "ones" not in causal_counts()


def test_a_graph_follows_a_mask_of_floats_that_is_changed() -> None:
    """What was read of it before is no part of the graph."""
    q, k, v = (tensor.to("npu") for tensor in tensors())
    mask, graph = padded_causal().to("npu"), torch.npu.NPUGraph()
    F.scaled_dot_product_attention(q, k, v, mask)
    with torch.npu.graph(graph):
        found = F.scaled_dot_product_attention(q, k, v, mask)
    mask[0, 0, :, 0] = LOWEST
    mask[0, 0, :, 1:] = 0
    graph.replay()
    expected = F.scaled_dot_product_attention(*(tensor.cpu() for tensor in (q, k, v, mask)))
    assert_near(found, expected, ROUNDING)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_computes_the_same(dynamic: bool) -> None:
    attend = torch.compile(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m) * 2, backend="aot_eager", dynamic=dynamic
    )
    for length in (6, 7):
        q, k, v = tensors(queries=length, keys=length)
        mask = padded_causal(queries=length, keys=length)
        found = attend(*(tensor.to("npu") for tensor in (q, k, v, mask)))
        assert_near(found, F.scaled_dot_product_attention(q, k, v, mask) * 2, ROUNDING)


def test_without_memory_it_launches_what_the_device_does() -> None:
    """As `inspect` counts a model."""
    called: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Noting():
        q, k, v = (torch.empty(2, 6, 4, 16, device="npu").transpose(1, 2) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # which makes the mask of all that follow
        called.clear()
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not {"aten.ones.default", "aten.triu.default"} & {*called}
    assert "npu.npu_fusion_attention_v3.default" in called


def test_nothing_is_said_when_kernels_are_registered() -> None:
    kernels_ext_npu.unregister()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels_ext_npu.register()


def test_the_page_says_how_many_launches_it_is(subtests) -> None:
    text = " ".join((ROOT / "docs" / "served.md").read_text().split())
    words = {3: "three", 4: "four"}
    cases = {"if it is causal": {"is_causal": True}, "with a boolean mask": {"attn_mask": padded_causal() == 0}}
    cases["with one of floats"] = {"attn_mask": padded_causal()}
    inputs = [tensor.transpose(1, 2).contiguous().to("npu") for tensor in tensors()]

    def launches(call: dict) -> int:
        npu_counts.reset()
        F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs), **call).transpose(1, 2).flatten(2)
        return sum(npu_counts.read().values())

    for name, call in cases.items():
        with subtests.test(name):
            on_npu = {key: value.to("npu") if isinstance(value, Tensor) else value for key, value in call.items()}
            kernels_ext_npu.register()
            assert [launches(on_npu) for _ in range(2)][-1] == 1
            kernels_ext_npu.unregister()
            count = launches(on_npu)
            assert count in words or count > 10
            assert f"{words.get(count, 'more than ten')} {name}" in text
