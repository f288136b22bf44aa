"""Classes are matched by what they compute: same words in other names match, other words do not."""

import functools
import inspect
import json

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.informer.modeling_informer import InformerAttention as Listed
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoRotaryEmbedding as Table
from transformers.utils.deprecation import deprecate_kwarg

from kernels_ext_npu.catalogue import ACTIVATIONS, LAYER_NORMS, MLPS, NORMS
from kernels_ext_npu.matching.classification import UNSUPPORTED, attention_refusal
from kernels_ext_npu.matching.fingerprint import fingerprint
from kernels_ext_npu.matching.known_forwards import FILE, is_installed, known_name
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS
from kernels_ext_npu.recognition.modules import recognise
from kernels_ext_npu.selftest.layers.layer_cases import MODULES
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import BLOCKS, reworded
from kernels_ext_npu.selftest.layers.other_releases import ORIGINALS

SQUARE = "hidden_states.pow(2).mean(-1, keepdim=True)"
MEAN = f"variance = {SQUARE}"
# norms of transformers in other words, and the layer that they match
WRITTEN: dict[str, tuple[type[nn.Module], dict[str, str], str | None]] = {
    "Renamed": (LlamaRMSNorm, {"hidden_states": "x", "variance =": "square =", "(variance +": "(square +"}, "RMSNorm"),
    "Annotated": (LlamaRMSNorm, {"input_dtype =": "'''Norms.'''\n    input_dtype: torch.dtype ="}, "RMSNorm"),
    "EpsOutside": (LlamaRMSNorm, {"torch.rsqrt(variance +": "(torch.rsqrt(variance) +"}, None),
    "Inlined": (
        LlamaRMSNorm,
        {f"{MEAN}\n": "pass\n", "variance + ": f"{SQUARE} + "},
        None,
    ),
    "MeanSubtracted": (LlamaRMSNorm, {MEAN: f"hidden_states = hidden_states - hidden_states.mean()\n    {MEAN}"}, None),
    "HelperOfAnotherClass": (GemmaRMSNorm, {"output": "out"}, "RMSNormZeroCentered"),
    "OtherConstant": (GemmaRMSNorm, {"1.0 +": "2.0 +"}, None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_in_other_words_matches_where_it_computes_the_same(name: str) -> None:
    base, changes, layer = WRITTEN[name]
    found = find_pattern(reworded(name, base, changes))
    assert (found and found.layers) == (layer and (layer,))


class OtherHelper(GemmaRMSNorm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


def twice(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args) * 2

    return wrapped


trained = ORIGINALS["mistral_large4:MistralLarge4TextRotaryEmbedding@5.24"].forward
inner = inspect.unwrap(trained)
renames = deprecate_kwarg("seconds", "9.9", new_name="position_ids")


def made(forward) -> type[nn.Module]:
    return type("Made", (nn.Module,), {"forward": forward})


@pytest.mark.parametrize(
    ("forward", "layer"),
    [
        (dynamic_rope_update(inner), "RotaryEmbeddingTrained"),
        (torch.no_grad()(dynamic_rope_update(inner)), "RotaryEmbeddingLearned"),
        (dynamic_rope_update(torch.no_grad()(inner)), "RotaryEmbeddingLearned"),
        (renames(dynamic_rope_update(inner)), "RotaryEmbeddingTrained"),
        (torch.no_grad()(renames(dynamic_rope_update(renames(inner)))), "RotaryEmbeddingLearned"),
    ],
)
def test_the_decorators_of_rotary_embeddings_are_seen_through_in_any_order(forward, layer: str) -> None:
    """A table that is trained has a gradient, unless it is under ``torch.no_grad``."""
    assert find_pattern(made(forward)).layers == (layer,)


def test_the_decorators_of_the_installed_transformers_are_seen_through() -> None:
    assert find_pattern(Table).layers == ("RotaryEmbeddingFloat32",)


def update_impostor(rope_forward):
    """Holds what dynamic_rope_update's wrapper holds, by the same name, and does something else."""

    @functools.wraps(rope_forward)
    def wrapper(self, x, position_ids, layer_type=None):
        return rope_forward(self, x, position_ids + 1)

    return wrapper


def no_grad_impostor(func):
    """The same for torch.no_grad's."""
    ctx_factory = torch.no_grad().clone

    @functools.wraps(func)
    def decorate_context(*args, **kwargs):
        with ctx_factory():
            return func(*args, **kwargs)[::-1]

    return decorate_context


def rename_impostor(func):
    """The same for deprecate_kwarg's."""

    @functools.wraps(func)
    def wrapped_func(*args, **kwargs):
        return func(*args, **kwargs)[::-1]

    return wrapped_func


@pytest.mark.parametrize(
    "forward",
    [
        inner,
        torch.no_grad()(inner),
        torch.enable_grad()(dynamic_rope_update(inner)),
        torch.inference_mode()(dynamic_rope_update(inner)),
        torch.no_grad()(update_impostor(inner)),
        no_grad_impostor(dynamic_rope_update(inner)),
        torch.no_grad()(dynamic_rope_update(twice(inner))),
        torch.no_grad()(dynamic_rope_update(dynamic_rope_update(inner))),
        rename_impostor(dynamic_rope_update(inner)),
        twice(Table.forward),
    ],
)
def test_other_decorators_are_not_seen_through(forward) -> None:
    assert find_pattern(made(forward)) is None


@pytest.mark.parametrize("forward", [
    twice(LlamaRMSNorm.forward), torch.no_grad()(LlamaRMSNorm.forward), lambda self, x: x,
    nn.LayerNorm.forward, nn.Module.forward, nn.Linear.forward, OtherHelper.forward,
])  # fmt: skip
def test_a_class_that_computes_something_else_does_not_match(forward) -> None:
    base = OtherHelper if forward is OtherHelper.forward else LlamaRMSNorm
    assert find_pattern(type("Made", (base,), {"forward": forward})) is None


def test_a_class_without_source_does_not_match() -> None:
    space = {"torch": torch, "nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x", space)
    assert fingerprint(space["Made"]) is None
    assert find_pattern(space["Made"]) is None


def test_the_objects_behind_global_names_count() -> None:
    """The same words, with another thing called torch."""
    forward = LlamaRMSNorm.forward
    function = type(forward)(forward.__code__, {**forward.__globals__, "torch": ACT2FN})
    assert fingerprint(type("Impostor", (nn.Module,), {"forward": function})) != fingerprint(LlamaRMSNorm)


def test_a_subclass_without_a_forward_of_its_own_matches() -> None:
    assert find_pattern(type("Child", (LlamaRMSNorm,), {})).layers == ("RMSNorm",)


def test_every_known_forward_is_of_this_release_or_of_another_and_is_found_as_itself() -> None:
    names = set(json.loads(FILE.read_text()))
    others = {known_name(each) for each in (*ORIGINALS.values(), *BLOCKS)}
    assert names == others | set(filter(is_installed, names))


def test_every_pattern_has_a_fingerprint_and_no_two_are_of_the_same_forward() -> None:
    known = json.loads(FILE.read_text())
    patterns = [*PATTERNS, *(each for each in FUNCTION_PATTERNS if not each.sibling_functions)]
    others = {"qwen3_moe:Qwen3MoeExperts", "torch:Conv2d", "torch:Conv3d", "torch:RMSNorm"}
    assert {each.name for each in patterns} <= known.keys() | others
    assert len({each.name for each in patterns}) == len(patterns)
    fingerprints = [each for found in known.values() for each in found]
    assert len(set(fingerprints)) == len(fingerprints)


class Averaging(nn.Conv2d):
    """Convolves by torch's forward, and by a method of its own that this calls."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight, bias).mean(1, keepdim=True)


def test_classes_of_torch_are_known_with_the_methods_that_they_have_there() -> None:
    assert find_pattern(type("Child", (nn.Conv2d,), {})).layers == ("PatchEmbedding",)
    assert find_pattern(Averaging) is None


class Named(nn.Module):
    def _scaled(self, x, factor):
        return x * factor.sqrt()

    def forward(self, x, y):
        return self._scaled(x=x, factor=y)


class Exchanged(nn.Module):
    def _scaled(self, factor, x):
        return factor * x.sqrt()

    def forward(self, x, y):
        return self._scaled(x=x, factor=y)


def test_a_helper_that_is_called_by_name_has_to_have_the_same_names() -> None:
    assert fingerprint(Named) != fingerprint(Exchanged)


# ---- attention that is not served ------------------------------------------------------------------------------------
REASON = UNSUPPORTED["attention"]["informer:InformerAttention"]


class Sub(Listed):
    """A class without a forward of its own."""


Namesake = type("InformerAttention", (nn.Module,), {"forward": LlamaAttention.forward})
Copied = type("InformerAttention", (nn.Module,), {"forward": Listed.forward})


@pytest.mark.parametrize("cls", [Namesake, LlamaAttention])
def test_a_class_with_another_forward_is_served_whatever_its_name(cls: type[nn.Module]) -> None:
    assert attention_refusal(cls) is None


@pytest.mark.parametrize("cls", [Listed, Sub, Copied])
def test_a_class_with_the_forward_of_one_that_is_listed_is_not(cls: type[nn.Module]) -> None:
    assert attention_refusal(cls) == REASON
    assert REASON.code == "changes semantics"


# ---- what fingerprints and runs say of the same classes --------------------------------------------------------------
# layers whose modules do more than their forwards show in a run: another dropout or weights for each layer, a global
# scale, the T5 projection that may stay in float32, and a sum
BY_FINGERPRINT_ALONE = {
    *("AddLayerNorm", "DropoutMLP", "DroppedMLP", "FusedAdaptedMLP", "FusedMLPByLayer", "GloballyScaledMLP"),
}
RUN = [
    (layer, make)
    for kind in (NORMS, LAYER_NORMS, MLPS, ACTIVATIONS)
    for layer in kind.layers
    for make in MODULES[layer]
    if layer not in BY_FINGERPRINT_ALONE
]


@pytest.mark.parametrize(("layer", "make"), RUN, ids=[layer for layer, _ in RUN])
def test_a_run_finds_the_layer_that_a_fingerprint_names(layer: str, make) -> None:
    module, _ = make()
    assert layer in find_pattern(type(module)).layers
    assert recognise(module).computed.layer == layer
