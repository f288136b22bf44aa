"""A model that is no model of transformers gets kernels for what its modules compute, and the report says which."""

import collections
import copy
import sys
import types

import pytest
import torch
import torch.nn.attention.varlen
from torch import nn
from torch.nn import functional as F

import kernels_ext_npu
from tests.integration.recognition.blocks import Block, said
from tests.integration.recognition.spellings.other_peoples_mlps import Helped, Projected
from tests.integration.recognition.spellings.other_peoples_models import (
    DiffusionTransformer,
    StudentsLlama,
    VisionTower,
)
from tests.integration.recognition.spellings.other_peoples_norms import WIDTH, EinsumNorm
from tests.support.served import rows

# model -> its arguments, and how often which layer serves it
MODELS = {
    DiffusionTransformer: (
        lambda: (torch.randn(2, 3, 16, 16), torch.rand(2)),
        {"RMSNorm": 4, "FusedSwiGLUMLP": 2, "NewGELU": 1},
    ),
    VisionTower: (lambda: (torch.randn(2, 3, 16, 16),), {"LayerNorm": 4, "DropoutMLP": 2, "QuickGELU": 2}),
    StudentsLlama: (lambda: (torch.randint(32, (2, 7)),), {"RMSNorm": 5, "SwiGLUMLP": 2}),
}


@pytest.fixture(params=MODELS, ids=lambda cls: cls.__name__)
def plain(request) -> nn.Module:
    torch.manual_seed(0)
    return request.param().eval()


def swapped(model: nn.Module) -> collections.Counter:
    return collections.Counter(row.kernel for row in rows(model) if row.swapped)


def test_a_plain_model_gets_the_kernels_that_compute_what_it_does(registered, plain) -> None:
    make, expected = MODELS[type(plain)]
    arguments = make()
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    found = swapped(model)
    assert {layer: found[layer] for layer in expected} == expected
    result = model(*(each.npu() for each in arguments)).cpu()
    # two blocks of sums of float32 in another order
    torch.testing.assert_close(result, plain(*arguments), rtol=1e-4, atol=1e-4)
    model.train()
    model(*(each.npu() for each in arguments)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_report_of_a_plain_model_names_its_kernels(registered, plain) -> None:
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    text = str(kernels_ext_npu.report(model))
    assert all(layer in text for layer in MODELS[type(plain)][1])
    assert not swapped(kernels_ext_npu.restore(model))


class NewRMSNorm(EinsumNorm):
    """A norm of a release of transformers that is newer than the patterns."""

    def forward(self, hidden_states):
        return EinsumNorm.forward(self, hidden_states)


class NewGLU(Projected):
    """A gated MLP of such a release."""

    def forward(self, hidden_states):
        up = self.w1(hidden_states)
        return self.w2(up * F.silu(self.w3(hidden_states)))


@pytest.mark.parametrize(("cls", "layer"), [(NewRMSNorm, "RMSNorm"), (NewGLU, "SwiGLUMLP")])
def test_what_transformers_spells_in_a_new_way_needs_no_pattern(registered, monkeypatch, cls, layer: str) -> None:
    library = {**globals(), "__name__": "transformers.models.new.modeling_new"}
    monkeypatch.setattr(cls, "__module__", library["__name__"])
    monkeypatch.setattr(cls, "forward", types.FunctionType(cls.forward.__code__, library))
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    assert said(model) == [(layer, True)]


def test_a_plain_model_is_compiled_as_its_classes_compute(registered, plain) -> None:
    arguments = [each.npu() for each in MODELS[type(plain)][0]()]
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    compiled = torch.compile(model, backend="eager")
    # two blocks of sums of float32 in another order
    torch.testing.assert_close(
        compiled(*arguments).cpu(), plain(*(each.cpu() for each in arguments)), rtol=1e-4, atol=1e-4
    )


class Mixer(nn.Module):
    """Attends under a name that says nothing, in a method that its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def mix(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))

    def forward(self, x):
        return self.mix(x).transpose(1, 2).flatten(2)


def mix(qkv):
    return attend(*qkv.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


FUNCTIONS = types.SimpleNamespace(mix=mix)


class ByFunctions(Mixer):
    """Attends in a function that one calls which its forward calls."""

    def forward(self, x):
        return FUNCTIONS.mix(self.qkv(x)).transpose(1, 2).flatten(2)


flash = F.scaled_dot_product_attention


class ByAnotherName(Mixer):
    """Calls torch's attention by the name under which its file has it."""

    def mix(self, x):
        return flash(*self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))


class ByImporting(Mixer):
    """Imports what attends where it is called."""

    def mix(self, x):
        from attending import by_heads

        return by_heads(*self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))


class ByLengths(Mixer):
    """Calls torch's attention of packed sequences, as of a file."""

    def mix(self, x):
        return torch.nn.attention.varlen.varlen_attn(*self.qkv(x).chunk(3, -1), *self.lengths)


def chosen_attention():
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v)


class MixerWithAttention(Mixer):
    """Gets the function that attends when it is made, as the attention of torchtune does."""

    def __init__(self) -> None:
        super().__init__()
        self._attention_call = chosen_attention()

    def mix(self, x):
        return self._attention_call(*self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))


class WithAName(nn.Module):
    """Has children under the names of these functions, and attends in nothing that it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.flash = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.flash(self.attend(x))


def weigh(scores):
    return scores.softmax(-1)


class OwnAttention(Mixer):
    """Weighs values in a function of its file."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return weigh(q @ k.mT) @ v


def test_attention_with_a_softmax_in_a_function_has_a_row(registered) -> None:
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"part": OwnAttention()}).to("npu"))
    (row,) = [row for row in rows(model) if row.path == "part"]
    assert "it does not call its attention by a name" in row.reason


@pytest.mark.parametrize("mixer", [Mixer, ByFunctions, ByAnotherName, ByImporting, ByLengths, MixerWithAttention])
def test_attention_that_torch_computes_has_a_row_whatever_its_name(registered, mixer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "attending", types.SimpleNamespace(by_heads=attend))
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"mixer": mixer(), "other": WithAName()}).to("npu"))
    assert not [row for row in rows(model) if row.path == "other"]
    (row,) = [row for row in rows(model) if row.path == "mixer"]
    assert (row.kernel, row.swapped) == ("npu_flash_attention", True)
    name = "varlen_attn" if mixer is ByLengths else "scaled_dot_product_attention"
    assert f"where it calls torch's {name}, which is the kernel's until unregister()" in row.reason
    kernels_ext_npu.unregister()
    (row,) = [row for row in rows(model) if row.path == "mixer"]
    assert not row.swapped


def test_what_has_no_forward_has_no_row(registered) -> None:
    class RotaryEmbedding(nn.Module):
        def rotate_queries_or_keys(self, t):
            return t

    held = nn.ModuleDict({"gate_proj": nn.Linear(32, 32), "up_proj": nn.Linear(32, 32)})
    model = kernels_ext_npu.kernelize(nn.ModuleDict({"rope": RotaryEmbedding(), "held": held}).to("npu"))
    assert not [row for row in rows(model) if row.path in ("rope", "held")]


def of_jit(block: nn.Module) -> nn.Module:
    block.w2 = torch.jit.script(block.w2)
    return block


def without_a_child(block: nn.Module) -> nn.Module:
    block.register_module("dropout", None)
    return block


@pytest.mark.parametrize(
    ("change", "is_served"),
    [
        (lambda block: torch.jit.trace(block, torch.randn(2, WIDTH)), False),
        (torch.jit.script, False),
        (torch.fx.symbolic_trace, False),
        (of_jit, False),
        (without_a_child, True),
    ],
    ids=["traced", "scripted", "fx", "a scripted child", "no child"],
)
def test_what_torch_makes_of_modules_stays_as_it_is(registered, change, is_served: bool) -> None:
    plain = change(Helped())
    x = torch.randn(2, 5, WIDTH)
    expected = plain(x)
    model = kernels_ext_npu.kernelize(nn.ModuleList([plain]).to("npu"))
    swapped = any(row.swapped for row in kernels_ext_npu.report(model) if row.path == "0")
    assert swapped is is_served
    torch.testing.assert_close(model[0](x.npu()).cpu(), expected, rtol=1e-5, atol=1e-5)


class Sparse(nn.Module):
    """A layer with places for what it may do, as models have that choose norms and branches by a setting."""

    def __init__(self, make: type[nn.ModuleList | nn.Sequential], *held: nn.Module | None) -> None:
        super().__init__()
        self.held = make(held) if make is nn.ModuleList else make(*held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.held:
            x = x if each is None else x + each(x)
        return x


@pytest.mark.parametrize("make", [nn.ModuleList, nn.Sequential])
def test_lists_may_have_empty_places(registered, make: type) -> None:
    plain = nn.Sequential(Sparse(make, None, EinsumNorm()), Sparse(make, EinsumNorm(), None), Sparse(make, None))
    x = torch.randn(2, 5, WIDTH)
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    assert swapped(model) == {"RMSNorm": 2}
    torch.testing.assert_close(model(x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)
