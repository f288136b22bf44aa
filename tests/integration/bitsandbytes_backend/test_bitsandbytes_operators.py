"""bitsandbytes' operators on the NPU give bitsandbytes' own values, in operators that no host waits for."""

import copy
import subprocess
from collections.abc import Callable, Iterator

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from torch import Tensor, nn

import softnpu
from kernels_ext_npu.bitsandbytes_backend import registration
from kernels_ext_npu.measuring.costs import Cost

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
own = torch.ops.bitsandbytes


def default(name: str, *args: object) -> tuple[Tensor, Tensor]:
    """Compute by bitsandbytes' formula for any device: its library for the CPU does not always find the nearest."""
    operator = getattr(own, name).default
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu(), expected)


@pytest.fixture(autouse=True)
def seeded_and_eager() -> Iterator[None]:
    """Compile none of the formulas that bitsandbytes has for the CPU: that takes a minute."""
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(("size", "blocksize"), [(4096, 64), (672, 64), (77, 32), (8192, 4096)])
def test_four_bits_are_those_of_the_cpu(size: int, blocksize: int, quant_type: str, dtype: torch.dtype) -> None:
    weight = torch.randn(size, dtype=dtype)
    weight[:32] = 0
    for storage in (torch.uint8, torch.bfloat16) if size % 4 == 0 else (torch.uint8,):
        packed, scales = own.quantize_4bit(weight, blocksize, quant_type, storage)
        on_npu, scales_on_npu = own.quantize_4bit(weight.npu(), blocksize, quant_type, storage)
        assert same(on_npu.view(torch.uint8), packed.view(torch.uint8))
        assert same(scales_on_npu, scales)
        expected = own.dequantize_4bit(packed, scales, blocksize, quant_type, [size], dtype)
        found = own.dequantize_4bit(on_npu, scales_on_npu, blocksize, quant_type, [size], dtype)
        assert same(found, expected.view(-1))
        out = torch.empty_like(found)
        own.dequantize_4bit.out(on_npu, scales_on_npu, blocksize, quant_type, [size], dtype, out=out)
        assert same(out, expected.view(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "signed"), [(4096, True), (1000, True), (4096, False)])
def test_bytes_of_blocks_are_those_of_the_formula(size: int, signed: bool, dtype: torch.dtype) -> None:
    code = functional.create_dynamic_map(signed=signed)
    x = torch.randn(size, dtype=dtype) if signed else torch.rand(size).square().to(dtype)
    expected, scales = default("quantize_blockwise", x, code, 256)
    found, scales_on_npu = own.quantize_blockwise(x.npu(), code.npu(), 256)
    assert same(found, expected)
    assert same(scales_on_npu, scales)
    values = own.dequantize_blockwise(found, scales_on_npu, code.npu(), 256, dtype)
    assert same(values, own.dequantize_blockwise(expected, scales, code, 256, dtype))
    out = torch.empty_like(values)
    own.dequantize_blockwise.out(found, scales_on_npu, code.npu(), 256, dtype, out=out)
    assert same(out, values.cpu())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_weights_and_products_of_a_layer_are_those_of_the_cpu(quant_type: str, nested: bool) -> None:
    weight, x = torch.randn(96, 128, dtype=torch.bfloat16), torch.randn(2, 5, 128, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, quant_type=quant_type, compress_statistics=nested)
    on_npu = copy.deepcopy(state)
    on_npu.to("npu")
    assert same(functional.dequantize_4bit(packed.npu(), on_npu), functional.dequantize_4bit(packed, state))
    bias = torch.randn(96, dtype=torch.bfloat16)
    found = bitsandbytes.matmul_4bit(x.npu(), packed.npu(), on_npu, bias=bias.npu())
    values = functional.dequantize_4bit(packed, state).double()
    exact = torch.nn.functional.linear(x.double(), values, bias.double())
    assert (found.cpu().double() - exact).abs().max() <= 2**-8 * exact.abs().max()  # rounded to bfloat16 once
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
    one = own.gemv_4bit(x[:, :1].npu(), packed.npu(), [96, 128], scales.npu(), on_npu.code, 64)
    assert same(one, torch.nn.functional.linear(x[:, :1].npu(), values.to(torch.bfloat16).npu()).cpu())


def test_nobody_waits_and_no_index_is_made_for_a_value() -> None:
    """Counted is what is made for a value: 2 bytes of indices of bytes, 4 of looked-up values, 2 of the result."""
    packed, scales = torch.zeros(2**15, 1, dtype=torch.uint8).npu(), torch.ones(2**10).npu()
    own.dequantize_4bit(packed, scales, 64, "nf4", [256, 256], torch.bfloat16)  # which makes the table
    softnpu.reset_counters()
    with Cost() as cost:
        own.dequantize_4bit(packed, scales, 64, "nf4", [256, 256], torch.bfloat16)
    assert not softnpu.counters()["stream_syncs"]
    assert sum(cost.bytes.values()) / 2**16 <= 23  # of which 2.5 are the weight as it lies and the result


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("rows", [1, 7])
def test_int8_products_with_outliers_are_those_of_the_cpu(rows: int, threshold: float) -> None:
    x, weight = torch.randn(rows, 3000).half(), torch.randn(40, 3000).half()
    x[0, 5], x[-1, 100] = 20, -30
    expected_weight, weight_scales, _ = own.int8_vectorwise_quant(weight.clone())
    on_npu, scales_on_npu, _ = own.int8_vectorwise_quant(weight.npu())
    assert same(on_npu, expected_weight)
    assert same(scales_on_npu, weight_scales)
    given, bias = x.npu(), torch.randn(40).half()
    softnpu.reset_counters()
    quantised, scales, columns = own.int8_vectorwise_quant(given, threshold)
    assert not softnpu.counters()["stream_syncs"]
    expected, expected_scales, expected_columns = own.int8_vectorwise_quant(x.clone(), threshold)
    assert same(quantised, expected)
    assert same(scales, expected_scales)
    product = own.int8_linear_matmul(quantised, on_npu)
    assert same(product, (expected.double() @ expected_weight.double().t()).to(torch.int32))
    if threshold:
        assert same(columns[columns >= 0], expected_columns)
        found, _ = own.int8_mixed_scaled_mm(given, quantised, on_npu, scales, scales_on_npu, columns, bias.npu())
    else:
        found = own.int8_scaled_mm(quantised, on_npu, scales, scales_on_npu, bias.npu(), torch.float16)
    values = expected.double() * expected_scales.double().view(-1, 1) / 127
    if threshold:
        values[:, expected_columns] = x.double()[:, expected_columns]
    exact = values @ (expected_weight.double() * weight_scales.double().view(-1, 1) / 127).t() + bias.double()
    # rounded to float16 twice, and the scale 1 / 127² of bitsandbytes has seven digits
    assert (found.cpu().double() - exact).abs().max() <= 2**-10 * exact.abs().max()


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Lion8bit", "RMSprop8bit", "Adagrad8bit", "AdamW"])
def test_an_optimiser_steps_as_on_the_cpu(name: str) -> None:
    stepped, gradient = {}, torch.randn(80, 128)
    for device in ("cpu", "npu"):
        torch.manual_seed(1)
        parameter = nn.Parameter(torch.randn(80, 128).to(device))
        optimiser = getattr(bitsandbytes.optim, name)([parameter], lr=1e-2)
        parameter.grad = gradient.to(device)
        softnpu.reset_counters()
        optimiser.step()
        assert not softnpu.counters()["stream_syncs"]
        stepped[device] = parameter.detach().cpu(), optimiser.state[parameter]
    # of one step: states are quantised behind it, by the CPU's library to codes that are not always the nearest
    assert torch.allclose(stepped["npu"][0], stepped["cpu"][0], rtol=2**-22, atol=1e-7)
    state = stepped["npu"][1]
    if state["state1"].dtype is torch.uint8:
        moved = own.dequantize_blockwise(state["state1"], state["absmax1"], state["qmap1"], 256, torch.float32)
        code, scales = state["qmap1"].cpu(), state["absmax1"].cpu()
        exact = own.dequantize_blockwise(stepped["cpu"][1]["state1"], scales, code, 256, torch.float32)
        assert torch.allclose(moved.cpu(), exact, atol=0.03 * scales.max())  # next to each other in the map


def test_bitsandbytes_finds_the_operators_by_itself() -> None:
    assert registration.is_registered()


def test_nothing_is_registered_where_torch_has_no_npu(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    said = run_python(
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import bitsandbytes\n"
        "from kernels_ext_npu.bitsandbytes_backend import registration\n"
        "print(registration.is_registered())"
    )
    assert said.stdout.strip().splitlines()[-1] == "False"
