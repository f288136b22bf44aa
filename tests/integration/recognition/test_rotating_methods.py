"""Methods that rotate, in modules that do more: they are replaced in their class where they read settings alone."""

import copy

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
from tests.integration.recognition.rotating_blocks import Block, assert_same, kernelized, launched

B, S, N, D = 2, 6, 4, 8
INTERLEAVED = "RotaryPosEmbInterleaved"


class Attention(nn.Module):
    """Has what it rotates by as its own, and turns queries and keys by one of its methods."""

    factor = 2

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(N * D, N * D), nn.Linear(N * D, N * D)
        self.width = D
        self.register_buffer("angles", torch.outer(torch.arange(S).float(), 10_000 ** (-torch.arange(0, D, 2) / D)))

    def turn(self, q, k):
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).view(B, S, N, D).transpose(1, 2) for layer in (self.q, self.k))
        q, k = self.turn(q, k)
        return (q @ k.mT).softmax(-1)


class ByHalves(Attention):
    def rotate_half(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def apply_rotary_pos_emb(self, q, k, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + self.rotate_half(q) * sin, k * cos + self.rotate_half(k) * sin

    def turn(self, q, k):
        both = torch.cat((self.angles, self.angles), -1)[None]
        return self.apply_rotary_pos_emb(q, k, both.cos(), both.sin())


class ByNeighbours(Attention):
    @staticmethod
    def _apply_rope(x, cos, sin):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    def turn(self, q, k):
        cos, sin = self.angles.cos()[None, None], self.angles.sin()[None, None]
        return self._apply_rope(q, cos, sin), self._apply_rope(k, cos, sin)


class BySettings(Attention):
    def apply_rotary(self, x, cos, sin):
        half = x.shape[-1] // self.factor
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def turn(self, q, k):
        cos, sin = self.angles.cos()[None, None], self.angles.sin()[None, None]
        return self.apply_rotary(q, cos, sin), self.apply_rotary(k, cos, sin)


class OfItsBase(BySettings):
    """Has the method from another class."""


class ByAnglesFirst(ByHalves):
    def apply_rotary_pos_emb(self, sin, cos, t):
        return ((t * cos) + (self.rotate_half(t) * sin)).to(t.dtype)

    def turn(self, q, k):
        both = torch.cat((self.angles, self.angles), -1)[None, None]
        return tuple(self.apply_rotary_pos_emb(both.sin(), both.cos(), t) for t in (q, k))


class ByItsBuffer(Attention):
    def apply_rotary(self, x):
        first, second = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def turn(self, q, k):
        return self.apply_rotary(q), self.apply_rotary(k)


class Counting(BySettings):
    calls = 0

    def apply_rotary(self, x, cos, sin):
        self.calls += 1
        return super().apply_rotary(x, cos, sin)


class FromBothEnds(BySettings):
    def apply_rotary(self, x, cos, sin):
        return x * cos.repeat(1, 1, 1, 2) + x.flip(-1) * sin.repeat(1, 1, 1, 2)


SERVED = {ByNeighbours: INTERLEAVED, **dict.fromkeys((ByHalves, BySettings, OfItsBase, ByAnglesFirst), "RotaryPosEmb")}
LEFT = {
    ByItsBuffer: "it is a method that reads more of its module than settings",
    Counting: "no kernel computes what it computes",
    FromBothEnds: "no kernel computes what it computes",
}


def rows(model: nn.Module) -> list:
    return [row for row in kernels_ext_npu.report(model) if row.function is not None]


def inputs() -> Tensor:
    return torch.randn(B, S, N * D, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = [parameter for parameter in model.parameters() if parameter.shape != (1,)]
    return list(torch.autograd.grad(model(x).square().sum(), [x, *weights]))


@pytest.mark.parametrize("cls", SERVED)
def test_a_method_is_replaced_and_computes_what_it_did(registered, cls: type[Attention]) -> None:
    torch.manual_seed(0)
    plain, x = cls(), inputs()
    model = kernelized(copy.deepcopy(plain))
    assert [(row.kernel, row.swapped, row.reason) for row in rows(model)] == [(SERVED[cls], True, None)]
    mine = x.detach().npu().requires_grad_()
    assert launched(lambda: model(mine)) == 2
    assert_same(model(mine), plain(x))
    assert_same(gradients(model, mine), gradients(plain, x))
    assert_same(plain(x), copy.deepcopy(model).cpu()(x))  # on the CPU the method is its own


@pytest.mark.parametrize("cls", LEFT)
def test_others_are_left_and_say_why(registered, cls: type[Attention]) -> None:
    plain, x = cls(), inputs()
    model = kernelized(copy.deepcopy(plain))
    (row,) = rows(model)
    assert not row.swapped
    assert LEFT[cls] in row.reason
    assert launched(lambda: model(x.npu())) == 0
    assert_same(model(x.npu()), plain(x))


def test_copies_and_other_modules_of_the_class_run_it_and_restoring_one_restores_all(registered) -> None:
    model, other, x = kernelized(BySettings()), BySettings().npu(), inputs().detach().npu().requires_grad_()
    assert [launched(lambda each=each: each(x)) for each in (model, copy.deepcopy(model), other)] == [2, 2, 2]
    kernels_ext_npu.restore(model)
    assert [launched(lambda each=each: each(x)) for each in (model, other)] == [0, 0]
    assert not hasattr(BySettings.apply_rotary, "__wrapped__")
    kernels_ext_npu.kernelize(model)
    kernels_ext_npu.unregister()
    assert not hasattr(BySettings.apply_rotary, "__wrapped__")


def test_a_module_whose_settings_are_others_rotates_by_itself(registered) -> None:
    model, x = kernelized(BySettings()), inputs().detach().npu().requires_grad_()
    model.part.factor = 4
    with pytest.raises(RuntimeError):  # as without kernels: halves are no quarters
        model(x)
    assert [(row.swapped, row.reason) for row in rows(model)] == [(False, "no kernel computes what it computes")]
    del model.part.factor
    assert launched(lambda: model(x)) == 2


class Scaled(BySettings):
    scale = 1.0

    def apply_rotary(self, x, cos, sin):
        return self.scale * super().apply_rotary(x, cos, sin)


def test_modules_of_a_class_may_have_settings_of_their_own(registered) -> None:
    plain, x = nn.ModuleList([Scaled(), Scaled()]), inputs()
    plain[1].scale = 0.5
    model, mine = kernelized(copy.deepcopy(plain)), x.detach().npu().requires_grad_()
    assert [row.swapped for row in rows(model)] == [True, True]
    for part, own in zip(model.part, plain):
        assert launched(lambda part=part: part(mine)) == 2
        assert_same(part(mine), own(x))
    model.part[0].scale = 2.0
    assert launched(lambda: model.part[0](mine)) == 0
    assert [row.swapped for row in rows(model)] == [False, True]
    kernels_ext_npu.kernelize(model)
    plain[0].scale = 2.0
    assert launched(lambda: model.part[0](mine)) == 2
    assert_same(model.part[0](mine), plain[0](x))


def test_a_compiled_module_traces_its_own_method(registered) -> None:
    plain, x = BySettings(), inputs()
    model = kernelized(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x.npu()), plain(x))


def test_without_the_kernel_of_rotations_it_is_left() -> None:
    kernels_ext_npu.register(kernels=["RMSNorm"])
    try:
        model = kernels_ext_npu.kernelize(Block(BySettings()).npu())
        assert launched(lambda: model(inputs().npu())) == 0
    finally:
        kernels_ext_npu.unregister()
