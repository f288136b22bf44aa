"""torch's own nn.MultiheadAttention and nn.TransformerEncoder on the NPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha

import kernels_ext_npu
from tests.support import npu_counts
from tests.support.nearness import assert_near

pytestmark = pytest.mark.usefixtures("registered")
BATCH, QUERIES, KEYS, SIZE, HEADS = 2, 6, 9, 64, 4
# float32 computes products of 64 numbers and a softmax; bfloat16 rounds q, k, v and the result
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


def inputs(kind: str, batch_first: bool = True, **sizes: int) -> list[Tensor]:
    """Draw queries, keys and values: of one tensor, of two, or of three."""
    torch.manual_seed(0)
    shapes = [(QUERIES, SIZE), (KEYS, sizes.get("kdim", SIZE)), (KEYS, sizes.get("vdim", SIZE))]
    q, k, v = (torch.randn(BATCH, *shape) for shape in shapes)
    drawn = {"self": [k] * 3, "cross": [q, k, k], "three": [q, k, v]}[kind]
    return drawn if batch_first else [{id(x): x.transpose(0, 1) for x in drawn}[id(x)] for x in drawn]


def padded(queries: int) -> Tensor:
    """Return which keys are padding."""
    mask = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    mask[1, 6:] = True
    return mask


def above(queries: int) -> Tensor:
    """Return which keys are behind a query."""
    return torch.ones(queries, KEYS, dtype=torch.bool).triu(KEYS - queries + 1)


def by_head(queries: int) -> Tensor:
    """Return which keys each head does not see."""
    mask = torch.rand(BATCH * HEADS, queries, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[:, :, 0] = False
    return mask


def as_floats(mask: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """Return a mask that is added to scores."""
    return lambda queries: torch.zeros(mask(queries).shape).masked_fill(mask(queries), -torch.inf)


MASKS: dict[str, dict[str, Callable[[int], Tensor]]] = {
    "none": {},
    "padding": {"key_padding_mask": padded},
    "mask": {"attn_mask": above},
    "by head": {"attn_mask": by_head},
    "both": {"key_padding_mask": padded, "attn_mask": above},
    "both in floats": {"key_padding_mask": as_floats(padded), "attn_mask": as_floats(above)},
}


def run(module: nn.Module, given: list[Tensor], dtype: torch.dtype, device: str, **options: Any) -> list[Tensor]:
    """Return the result of a copy of a module, and the gradients of its arguments and parameters."""
    module = copy.deepcopy(module).to(device, dtype)
    leaves = {id(x): x.detach().to(device, dtype).requires_grad_() for x in given}
    masks = {
        name: each.to(device, dtype if each.is_floating_point() else None) if isinstance(each, Tensor) else each
        for name, each in options.items()
    }
    y, weights = module(*(leaves[id(x)] for x in given), need_weights=False, **masks)
    assert weights is None
    y.square().sum().backward()
    return [y, *(leaf.grad for leaf in leaves.values()), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", ["self", "cross", "three"])
def test_gives_what_float64_gives(kind: str, masks: str, dtype: torch.dtype) -> None:
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    given = inputs(kind)
    options = {name: make(given[0].shape[1]) for name, make in MASKS[masks].items()}
    rounded = [{id(x): x.to(dtype) for x in given}[id(x)] for x in given]
    expected = run(module.to(dtype), rounded, torch.float64, "cpu", **options)
    npu_counts.reset()
    found = run(module, rounded, dtype, "npu", **options)
    counted = npu_counts.read()
    assert sum(n for name, n in counted.items() if "fusion_attention" in name and "grad" not in name) == 1
    # a mask of floats is read once; the copies of results are counted, too
    assert counted["device_to_host_copies"] == (2 if masks == "both in floats" else 0)
    for mine, theirs in zip(found, expected, strict=True):
        assert_near(mine, theirs, 4 * ROUNDING[dtype] if mine is not found[0] else ROUNDING[dtype])


@pytest.mark.parametrize("options", [{"batch_first": False}, {"bias": False}, {"kdim": 24, "vdim": 40}], ids=str)
def test_other_layouts(options: dict) -> None:
    options = {"batch_first": True, **options}
    module = nn.MultiheadAttention(SIZE, HEADS, **options)
    sizes = {name: options[name] for name in ("kdim", "vdim") if name in options}
    given, mask = inputs("three", options["batch_first"], **sizes), padded(QUERIES)
    expected = run(module, given, torch.float64, "cpu", key_padding_mask=mask)
    for mine, theirs in zip(run(module, given, torch.float32, "npu", key_padding_mask=mask), expected, strict=True):
        assert_near(mine, theirs, 4 * ROUNDING[torch.float32])


def test_a_hint_that_a_mask_is_causal() -> None:
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    given = inputs("self")
    options = {"attn_mask": above(KEYS), "is_causal": True}
    for mine, theirs in zip(
        run(module, given, torch.float32, "npu", **options),
        run(module, given, torch.float64, "cpu", **options),
        strict=True,
    ):
        assert_near(mine, theirs, 4 * ROUNDING[torch.float32])


def test_a_query_without_keys_gets_what_torch_gives() -> None:
    module, (x, *_) = nn.MultiheadAttention(SIZE, HEADS, batch_first=True).eval(), inputs("self")
    mask = padded(KEYS)
    mask[0] = True
    with torch.no_grad():
        expected = module(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        module.npu()
        found = module(x.npu(), x.npu(), x.npu(), key_padding_mask=mask.npu(), need_weights=False)[0]
    assert_near(found, expected, ROUNDING[torch.float32])


@pytest.mark.parametrize(
    ("made", "called"),
    [
        ({}, {"need_weights": True}),
        ({}, {"need_weights": True, "average_attn_weights": False}),
        ({}, {"attn_mask": torch.linspace(-1, 1, KEYS).expand(KEYS, KEYS)}),
        ({"add_bias_kv": True}, {"key_padding_mask": padded(KEYS)}),
        ({"add_zero_attn": True}, {}),
    ],
    ids=["weights", "weights by head", "a bias", "learned keys", "a zero"],
)
def test_what_is_more_than_attention_stays_torchs(made: dict, called: dict) -> None:
    module, (x, *_) = nn.MultiheadAttention(SIZE, HEADS, batch_first=True, **made), inputs("self")
    called = {"need_weights": False, **called}
    expected = module(x, x, x, **called)
    given = {name: each.npu() if isinstance(each, Tensor) else each for name, each in called.items()}
    x = x.npu()
    for mine, theirs in zip(module.npu()(x, x, x, **given), expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert_near(mine, theirs, ROUNDING[torch.float32])


def test_a_bias_beside_padding_is_read_once_and_added() -> None:
    module, (x, *_) = nn.MultiheadAttention(SIZE, HEADS, batch_first=True), inputs("self")
    masks = {
        "key_padding_mask": as_floats(padded)(KEYS),
        "attn_mask": torch.linspace(-1, 1, KEYS * KEYS).view(KEYS, KEYS),
    }
    expected = module(x, x, x, need_weights=False, **masks)[0]
    module, x, masks = module.npu(), x.npu(), {name: mask.npu() for name, mask in masks.items()}
    npu_counts.reset()
    for _ in range(3):
        found = module(x, x, x, need_weights=False, **masks)[0]
    counted = npu_counts.read()
    assert counted["device_to_host_copies"] == 2  # one for each mask
    assert (counted["addmm"], counted["matmul"]) == (2 * 3, 2 * 3)  # into attention and out of it; scores and values
    assert_near(found, expected, ROUNDING[torch.float32])


def test_one_sequence_and_wrong_masks() -> None:
    module, (x, *_) = nn.MultiheadAttention(SIZE, HEADS, batch_first=True), inputs("self")
    expected = module(x[0], x[0], x[0], need_weights=False)[0]
    module, x = module.npu(), x.npu()
    assert_near(module(x[0], x[0], x[0], need_weights=False)[0], expected, ROUNDING[torch.float32])
    with pytest.raises(RuntimeError, match="shape of the 2D attn_mask"):
        module(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.bool, device="npu"), need_weights=False)
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        module(x, x, x, is_causal=True, need_weights=False)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_computes_on_the_npu(norm_first: bool, training: bool) -> None:
    """torch_npu alone computes its layers on the CPU in inference, and fails where rows have padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 128, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder, (x, *_) = nn.TransformerEncoder(layer, 3, enable_nested_tensor=not norm_first), inputs("self")
    encoder.train(training)
    mask = padded(KEYS)
    with torch.set_grad_enabled(training):
        expected = copy.deepcopy(encoder).double()(x.double(), src_key_padding_mask=mask)
        encoder, x, mask = encoder.npu(), x.npu(), mask.npu()
        npu_counts.reset()
        found = encoder(x, src_key_padding_mask=mask)
        counted = npu_counts.read()
    assert sum(n for name, n in counted.items() if "fusion_attention" in name) == 3
    assert counted["device_to_host_copies"] == 1  # torch makes floats of the mask, which are read once
    assert_near(found[~mask], expected[~mask.cpu()], 3 * ROUNDING[torch.float32])


def test_a_compiled_one_computes_the_same() -> None:
    module, (x, *_) = nn.MultiheadAttention(SIZE, HEADS, batch_first=True), inputs("self")
    expected = module(x, x, x, key_padding_mask=padded(KEYS), need_weights=False)[0]
    x, mask = x.npu(), padded(KEYS).npu()
    compiled = torch.compile(module.npu(), backend="aot_eager")
    assert_near(compiled(x, x, x, key_padding_mask=mask, need_weights=False)[0], expected, ROUNDING[torch.float32])


def test_the_report_says_when_the_kernel_computes_it() -> None:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 128, batch_first=True).npu()
    (row,) = (row for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(layer)) if row.kind == "attention")
    assert row.swapped
    assert row.reason.startswith("where it calls torch's scaled_dot_product_attention")


def test_afterwards_torch_is_as_it_was() -> None:
    kernels_ext_npu.unregister()
    for enabled in (True, False):
        mha.set_fastpath_enabled(enabled)
        before = nn.MultiheadAttention.forward
        kernels_ext_npu.register()
        assert not mha.get_fastpath_enabled()
        assert nn.MultiheadAttention.forward is not before
        kernels_ext_npu.unregister()
        assert mha.get_fastpath_enabled() == enabled
        assert nn.MultiheadAttention.forward is before
    mha.set_fastpath_enabled(True)
