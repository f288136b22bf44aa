"""Checkpoints of compressed-tensors in int8 and int4, as it writes them: kept so, and multiplied so, on the NPU."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kernels_ext_npu
import softnpu
from tests.support import pages, zoo

pytestmark = pytest.mark.usefixtures("registered")
CHANNELS = QuantizationArgs(num_bits=8, strategy="channel")
TOKENS = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
GROUPS = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
SCHEMES: dict[str, dict[str, Any]] = {
    "W8A16": {"weights": CHANNELS, "format": "int-quantized"},
    "W8A16 packed": {"weights": CHANNELS, "format": "pack-quantized"},
    "W8A8": {"weights": CHANNELS, "input_activations": TOKENS, "format": "int-quantized"},
    "W4A16": {"weights": GROUPS, "format": "pack-quantized"},
    "W4A16 asymmetric": {"weights": GROUPS.model_copy(update={"symmetric": False}), "format": "pack-quantized"},
    "W8A16 asymmetric": {"weights": CHANNELS.model_copy(update={"symmetric": False}), "format": "int-quantized"},
}
REMARKS = {"W8A16": "int8", "W8A16 packed": "int8", "W8A8": "int8, and its input", "W4A16": "int4 in groups of 32"}
REMARKS |= {"W4A16 asymmetric": "int4 in groups of 32 with zero points", "W8A16 asymmetric": "int8 with zero points"}
OPERATORS = {"W8A8": ("npu_dynamic_quant", "npu_quant_matmul")}
ARCHITECTURE = "qwen2"  # with biases
IDS = torch.arange(8, 16)[None]  # none that a config names


def write(folder: Path, scheme: dict[str, Any], architecture: str = ARCHITECTURE) -> None:
    """Write a tiny checkpoint as compressed-tensors does: rounded to the nearest, scaled by what lies furthest."""
    model = zoo.build(architecture).bfloat16()
    groups = {"group_0": QuantizationScheme(targets=["Linear"], **scheme)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            alike = module.weight.detach().view(*module.weight_scale.shape, -1)
            scale, zero = calculate_qparams(alike.amin(-1), alike.amax(-1), found.weights)
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_(zero)
            if "input_scale" in module._parameters:
                module.input_scale.data.fill_(0.05)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def layers(model: Any) -> dict[str, Any]:
    """The layers in few bits, whoever computes them."""
    return {path: m for path, m in model.named_modules() if "weight_scale" in m._parameters}


def kernel_of(model: Any) -> set[tuple[str | None, bool, str | None]]:
    return {(row.kernel, row.swapped, row.reason) for row in kernels_ext_npu.report(model).projections}


def wide(folder: Path, **options: Any) -> Any:
    """The model as compressed-tensors makes it wide by itself."""
    model = load(folder, **options)
    model.hf_quantizer.compressor.decompress_model(model)
    return model


@pytest.fixture(params=SCHEMES)
def name(request) -> str:
    if request.param == "W4A16 asymmetric" and transformers.__version__ == "5.24.0":
        pytest.skip("transformers 5.24.0 loads no zero points that are packed: it takes their shape for a wrong one")
    return request.param


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    write(tmp_path, SCHEMES[name], ARCHITECTURE)
    return tmp_path


@pytest.fixture
def served(name: str, folder: Path) -> Any:
    model = load(folder, device_map="npu", use_kernels=True)
    assert kernel_of(model) == {("quantised_linear", True, REMARKS[name])}
    return model


def test_a_layer_is_one_operator_and_computes_what_the_wide_one_does(name: str, folder: Path, served: Any) -> None:
    """Of weights that compressed-tensors rounds to bfloat16, as the operator does; W8A8 keeps them whole."""
    torch.manual_seed(0)
    for path, plain in layers(wide(folder)).items():
        x, weight = torch.randn(2, 5, plain.in_features).bfloat16(), plain.weight.double()
        softnpu.reset_counters()
        found = served.get_submodule(path)(x.npu())
        counters = {k: v for k, v in softnpu.counters().items() if v and k != "copy_"}
        assert counters == dict.fromkeys(OPERATORS.get(name, ("npu_weight_quant_batchmatmul",)), 1)
        bias = None if plain.bias is None else plain.bias.double()
        exact = torch.nn.functional.linear(x.double(), weight, bias)
        terms = x.double().abs() @ weight.abs().T
        # the result is rounded once, its terms are added up in float32
        allowed = 2.0**-8 * exact.abs() + 2.0**-20 * terms
        if name == "W8A8":  # half a step of each number of a row, and weights that are not rounded to bfloat16
            step = x.double().abs().amax(-1, keepdim=True) / 127
            allowed += step / 2 * weight.abs().sum(1) + 2.0**-9 * terms
        assert ((found.cpu().double() - exact).abs() <= allowed).all()


def test_weights_stay_in_few_bits(served: Any) -> None:
    plain = kernels_ext_npu.kernelize(zoo.build(ARCHITECTURE).bfloat16().npu())
    with torch.no_grad():
        plain(input_ids=IDS.npu())  # which keeps a mask
        before, dtypes = torch.npu.memory_allocated(), [p.dtype for p in served.parameters()]
        torch.npu.reset_peak_memory_stats()
        softnpu.reset_counters()
        served(input_ids=IDS.npu())
    counters = softnpu.counters()
    assert counters["stream_syncs"] == counters["device_to_host_copies"] == 0
    assert [p.dtype for p in served.parameters()] == dtypes
    assert torch.npu.memory_allocated() == before
    in_bfloat16 = sum(2 * layer.in_features * layer.out_features for layer in layers(served).values())
    assert torch.npu.max_memory_allocated() - before < in_bfloat16 / 2


def test_it_generates(folder: Path, served: Any) -> None:
    """Each token is among those that are likeliest in the wide model, by what bfloat16 tells apart."""
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = served.generate(IDS.npu(), **options).cpu()
    with torch.no_grad():
        logits = wide(folder)(input_ids=found).logits[0, IDS.shape[1] - 1 : -1]
    chosen = logits.gather(1, found[0, IDS.shape[1] :, None])[:, 0]
    assert (logits.amax(-1) - chosen <= 2.0**-4 * logits.abs().amax(-1)).all()


def test_states_are_those_of_the_checkpoint(folder: Path, served: Any, tmp_path: Path) -> None:
    published = load_file(folder / "model.safetensors")
    served.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in published.items())
    logits = served(input_ids=IDS.npu()).logits
    served.load_state_dict({key: torch.zeros_like(tensor) for key, tensor in published.items()})
    assert (served(input_ids=IDS.npu()).logits == 0).all()
    served.load_state_dict(published)
    assert torch.equal(served(input_ids=IDS.npu()).logits, logits)
    served.load_state_dict(served.state_dict())
    assert torch.equal(served(input_ids=IDS.npu()).logits, logits)
    again = load(tmp_path / "saved", device_map="npu", use_kernels=True)
    assert torch.equal(again(input_ids=IDS.npu()).logits, logits)


def test_restored_it_is_compressed_tensors_own(folder: Path, served: Any) -> None:
    logits = served(input_ids=IDS.npu()).logits
    copied = copy.deepcopy(served)
    assert torch.equal(copied(input_ids=IDS.npu()).logits, logits)
    with pytest.raises(TypeError, match=re.escape("restore(model) first")):
        pickle.dumps(served)
    kernels_ext_npu.restore(served)
    published = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor.cpu(), published[key]) for key, tensor in served.state_dict().items())
    kernels_ext_npu.kernelize(served)
    assert torch.equal(served(input_ids=IDS.npu()).logits, logits)
    kernels_ext_npu.restore(served)
    served(input_ids=IDS.npu())
    for path, layer in layers(wide(folder)).items():
        assert torch.equal(served.get_submodule(path).weight.cpu(), layer.weight)
    assert {swapped for _, swapped, _ in kernel_of(copied)} == {True}


def test_a_part_that_is_restored_is_made_wide_at_once(folder: Path, served: Any) -> None:
    kernels_ext_npu.restore(served.model.layers[0])
    plain = wide(folder)
    for path, layer in layers(plain.model.layers[0]).items():
        assert torch.equal(served.model.layers[0].get_submodule(path).weight.cpu(), layer.weight)
    with torch.no_grad():
        found, expected = served(input_ids=IDS.npu()).logits.cpu(), plain(input_ids=IDS).logits
    assert (found - expected).abs().max() <= 2.0**-4 * expected.abs().max()
    kernels_ext_npu.restore(served)
    served(input_ids=IDS.npu())
    assert {layer.weight.dtype for layer in layers(served).values()} == {torch.bfloat16}


def test_a_model_that_waits_for_its_first_call_is_not_made_wide(folder: Path) -> None:
    kernels_ext_npu.register(everywhere=True)
    model = load(folder, device_map="npu")
    dtypes = [p.dtype for p in model.parameters()]
    with torch.no_grad():
        first, second = (model(input_ids=IDS.npu()).logits for _ in range(2))
    assert torch.equal(first, second)
    assert [p.dtype for p in model.parameters()] == dtypes
    assert {swapped for _, swapped, _ in kernel_of(model)} == {True}
    assert model.config.quantization_config.quantization_config.quantization_status == "compressed"
    compressor = model.hf_quantizer.compressor
    compressor.decompress_model(model)  # what is served is none of its own
    assert [p.dtype for p in model.parameters()] == dtypes
    compressor.compress_model(model)  # as llm-compressor does to save it, which adds the hook again
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS.npu()).logits, first)
    assert model.config.quantization_config.quantization_config.quantization_status == "compressed"


def test_a_gradient_reaches_adapters_below(folder: Path, served: Any) -> None:
    """peft's own forward calls the layer; the gradient of the input is that of the wide layer."""
    path, layer = next(iter(layers(served).items()))
    torch.manual_seed(0)
    x, grad = torch.randn(3, layer.in_features).bfloat16(), torch.randn(3, layer.out_features).bfloat16()
    leaf = x.npu().requires_grad_()
    layer(leaf).backward(grad.npu())
    weight = wide(folder).get_submodule(path).weight.double()
    exact, terms = grad.double() @ weight, grad.double().abs() @ weight.abs()
    assert ((leaf.grad.cpu().double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * terms).all()
    if "weight" not in layer._parameters:  # which peft asks for, of compressed-tensors' own layers, too
        return
    model = get_peft_model(served, LoraConfig(target_modules=["q_proj"], lora_alpha=4))
    model(input_ids=IDS.npu(), labels=IDS.npu()).loss.backward()
    adapters = {n: p for n, p in model.named_parameters() if "lora_B" in n}
    assert adapters
    assert all(p.grad.abs().max() > 0 for p in adapters.values())
    reasons = {r.reason for r in kernels_ext_npu.report(model).projections if r.path.endswith("q_proj")}
    assert reasons == {"of the layer that it adapts: compressed-tensors keeps its weight in few bits"}


def static(args: QuantizationArgs) -> dict[str, Any]:
    return {"weights": CHANNELS, "input_activations": args, "format": "int-quantized"}


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({"weights": QuantizationArgs(num_bits=8, type="float", strategy="channel")}, "float of 8 bits"),
        (static(QuantizationArgs(num_bits=8, strategy="tensor")), "quantised other than by row"),
        ({"weights": QuantizationArgs(num_bits=8, strategy="tensor"), "format": "int-quantized"}, "those of rows"),
    ],
)
def test_what_is_kept_otherwise_is_made_wide_as_ever(scheme: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path, scheme)
    model = load(tmp_path, device_map="npu", use_kernels=True)
    ((_, swapped, said),) = kernel_of(model)
    assert not swapped
    assert reason in str(said)
    with torch.no_grad():
        assert model(input_ids=IDS.npu()).logits.isfinite().all()
    assert {layer.weight.dtype for layer in layers(model).values()} == {torch.bfloat16}


def test_groups_that_the_operator_does_not_take_stay_too(tmp_path: Path) -> None:
    write(tmp_path, {"weights": GROUPS.model_copy(update={"group_size": 16}), "format": "pack-quantized"})
    model = load(tmp_path, device_map="npu", use_kernels=True)
    ((_, swapped, said),) = kernel_of(model)
    assert swapped
    assert "made wide in each call: the operator takes groups of 32" in str(said)
    with torch.no_grad():
        found, expected = model(input_ids=IDS.npu()).logits.cpu(), wide(tmp_path)(input_ids=IDS).logits
    assert (found - expected).abs().max() <= 2.0**-5 * expected.abs().max()
    assert {p.dtype for layer in layers(model).values() for p in layer.parameters()} >= {torch.int32}


def test_a_part_of_a_model_is_made_wide_with_it(tmp_path: Path) -> None:
    write(tmp_path, SCHEMES["W4A16"])
    model = load(tmp_path, device_map="npu")
    kernels_ext_npu.kernelize(model.model)
    ((_, swapped, said),) = kernel_of(model.model)
    assert not swapped
    assert "kernelize that model" in str(said)
    with torch.no_grad():
        assert model(input_ids=IDS.npu()).logits.isfinite().all()


def test_the_recipe_says_how_weights_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, SCHEMES["W4A16"])
    kernels_ext_npu.unregister()
    code = pages.read(pages.DOCS / "recipes.md").code("A published checkpoint in four bits")
    name = "RedHatAI/Qwen3-8B-quantized.w4a16"
    assert name in code
    exec(code.replace(name, str(tmp_path)), {})
    assert "→ quantised_linear: int4" in capsys.readouterr().out


def test_it_is_compiled_switched_and_moved(served: Any) -> None:
    path, layer = next(iter(layers(served).items()))
    x = torch.randn(3, layer.in_features).bfloat16()
    with torch.no_grad():
        expected = layer(x.npu())
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x.npu()), expected)
        assert torch.equal(served.train().eval().get_submodule(path)(x.npu()), expected)
        moved = served.cpu().get_submodule(path)(x)
    assert (moved - expected.cpu()).abs().max() <= 2.0**-7 * expected.cpu().abs().max()  # the sum in another order
