"""Every class that calls attention by name: ours on the NPU against eager attention in float32 on the CPU."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import ATTENTION
from kernels_ext_npu.matching import classification
from tests.support import attention_types as types
from tests.support import zoo
from tests.support.attention_models import on_npu
from tests.support.zoo import Inputs

NAME = "npu_flash_attention"
Batch = tuple[str, Inputs, types.Rows]
# Both are float32, with sums in another order, through layers whose weights are drawn without a scale; gradients are
# sums over all rows, those of padding too.
FLOAT32 = 5e-5
# the views of outputs, logits that are scaled, an encoder, an encoder with a decoder, a decoder with cross attention
SAMPLE = ["JetMoeForCausalLM", "HyperCLOVAXForCausalLM", "GteForMaskedLM", "M2M100ForConditionalGeneration", "whisper"]
ALL = [
    name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long)
    for name in [*types.CLASSES, *sorted(zoo.ARCHITECTURES)]
]


def difference(found: Tensor, expected: Tensor) -> float:
    error = (found.detach().cpu().float() - expected.detach()).abs()
    return float(error.max() / max(1.0, float(expected.detach().abs().max()))) if error.numel() else 0.0


def pair(name: str, is_named: bool = True) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Make a model with eager attention on the CPU, and one on the NPU that names ours, or nothing."""
    model = types.build(name)
    ours = copy.deepcopy(model).to("npu")
    if not types.served(model) or not any(
        classification.attention_refusal(type(m)) is None for m in types.served(model)
    ):
        pytest.skip("it has no attention that is served")
    model.set_attn_implementation("eager")
    if is_named:
        ours.set_attn_implementation(NAME)
    elif not any(row.swapped for row in kernels_ext_npu.report(ours) if row.kind == ATTENTION.in_models):
        pytest.skip("it has no attention that is served where nobody names it")
    return model, ours


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let sdpa be transformers' own for a while."""
    kernels_ext_npu.unregister()
    yield
    kernels_ext_npu.register()


def assert_same_outputs_and_gradients(batches: Iterable[Batch], model: PreTrainedModel, ours: PreTrainedModel) -> None:
    """Compare outputs and all gradients of each batch."""
    apart = {}
    for batch, inputs, rows in batches:
        outputs = []
        for each, given in ((model, inputs), (ours, on_npu(inputs))):
            each.zero_grad()
            output = types.kept(types.main_output(each, given), rows)
            outputs.append(output)
            if output.requires_grad:
                weights = torch.linspace(-9, 9, output.numel()).sin().view(output.shape)
                (output * weights.to(output.device)).sum().backward()
        apart[batch] = difference(outputs[1], outputs[0])
        found = dict(ours.named_parameters())
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                apart[f"{batch}: {key}"] = difference(found[key].grad, parameter.grad)
    assert {what: far for what, far in apart.items() if not far <= FLOAT32} == {}


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("name", ALL)
def test_outputs_and_gradients_are_those_of_eager_attention(registered, name, is_named) -> None:
    model, ours = pair(name, is_named)
    assert_same_outputs_and_gradients(types.batches(name, model), model, ours)


def in_steps(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> Tensor:
    """Run sequences in a prefill of two steps, one of a token, and one of several."""
    found, cache = [], DynamicCache(config=model.config)
    for start, end in ((0, 4), (4, 7), (7, 8), (8, 11)):
        with torch.no_grad():
            outputs = model(tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        found.append(outputs.logits)
    return torch.cat(found, 1)


def decodes(name: str) -> bool:
    return name in types.CLASSES and name.endswith(("ForCausalLM", "LMHeadModel"))


@pytest.mark.parametrize("name", [param for param in ALL if decodes(getattr(param, "values", [param])[0])])
def test_steps_over_a_cache_and_greedy_tokens_are_those_of_eager_attention(registered, name) -> None:
    model, ours = pair(name)
    if not getattr(model.config, "is_decoder", True):
        pytest.skip("its config says that it is an encoder")
    _, inputs, rows = list(types.batches(name, model))[1]  # padded on the left
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    expected, found = in_steps(model, tokens, mask), in_steps(ours, tokens.npu(), mask.npu())
    assert difference(types.kept(found, rows), types.kept(expected, rows)) <= FLOAT32
    for cache in ("dynamic", "static") if model._can_compile_fullgraph else ("dynamic",):  # not all take static ones
        options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
        expected = model.generate(tokens, attention_mask=mask, **options)
        assert ours.generate(tokens.npu(), attention_mask=mask.npu(), **options).tolist() == expected.tolist()


def compiled(model: PreTrainedModel, batches: list[Batch]) -> tuple[list[Tensor], int, int]:
    """Compile a model, and return its outputs, of how many graphs it is, and how many frames are in none.

    Breaks are not counted: each is one in every frame around it.
    """
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="aot_eager")
    found = []
    with torch.no_grad():
        for _, inputs, rows in batches:
            found.append(types.kept(types.main_output(model, on_npu(inputs)), rows))
    model._compiled_call_impl = None
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], counters["frames"]["total"] - counters["frames"]["ok"]


# lengths of pictures are read while its graph runs
COMPILED_QUICKLY = "pixtral"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == COMPILED_QUICKLY else pytest.mark.long)
        for name in (getattr(param, "values", [param])[0] for param in ALL)
    ],
)
def test_compiled_it_gives_what_eager_attention_gives_in_as_many_graphs_as_others(registered, name) -> None:
    """Plain, padded on either side, and packed; as sdpa, or as eager where a class has no sdpa."""
    model, _ = pair(name)
    batches = list(types.batches(name, model))
    with without_kernels():
        others = types.build(name).to("npu")
        for implementation in ("sdpa", "eager"):
            try:
                others.set_attn_implementation(implementation)
            except ValueError:
                continue
            break
        try:
            _, graphs, uncompiled = compiled(others, batches)
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            pytest.skip(f"it does not compile with {implementation}: {what}")
    model, ours = pair(name)
    found, own_graphs, own_uncompiled = compiled(ours, batches)
    with torch.no_grad():
        for ours_out, (_, inputs, rows) in zip(found, batches):
            assert difference(ours_out, types.kept(types.main_output(model, inputs), rows)) <= FLOAT32
    assert own_graphs <= graphs
    assert own_uncompiled <= uncompiled


# chooses keys by scores that are rounded, so that an error is as large as chance has it
CHOOSING = {"HYV4ForCausalLM"}


@pytest.mark.parametrize("name", [param for param in ALL if getattr(param, "values", [param])[0] not in CHOOSING])
def test_in_bfloat16_it_is_no_further_from_float32_than_others_are(registered, name) -> None:
    """Than eager or sdpa, whichever is further; the roots of mean squares differ by chance by some percent."""
    model, ours = pair(name)
    _, inputs, rows = next(iter(types.batches(name, model)))
    given = {key: value.bfloat16() if value.is_floating_point() else value for key, value in on_npu(inputs).items()}
    with torch.no_grad():
        expected = types.kept(types.main_output(model, inputs), rows)

        def error(implementation: str) -> float:
            ours.to(torch.bfloat16).set_attn_implementation(implementation)
            found = types.kept(types.main_output(ours, given), rows).cpu().float()
            return float((found - expected).square().mean().sqrt())

        others = []
        with suppress(ValueError):  # not all classes have experts; a copy would name ours when it is gone
            ours.set_experts_implementation("grouped_mm")
        with without_kernels():
            for implementation in ("eager", "sdpa"):
                with suppress(ValueError):  # not all classes have sdpa
                    others.append(error(implementation))
        assert error(NAME) <= 1.2 * max(others)
