"""Modules of other people's code that make cos and sin of positions are served because of what they compute."""

import copy

import pytest
import torch
from torch import nn

import kernels_ext_npu
from tests.support import npu_counts
from tests.support.served import rows

pytestmark = pytest.mark.usefixtures("registered")
FREQUENCIES = 100.0 ** -torch.linspace(0, 1, 8)


class Table(nn.Module):
    """One that is served, of which each other changes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", FREQUENCIES.clone())
        self.scale = 1.25

    def angles(self, positions):
        return positions[..., None].float() * self.freqs.float()

    def both(self, angles):
        return torch.cat((angles, angles), -1)

    def forward(self, x, positions, length=None):
        angles = self.both(self.angles(positions))
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


class ByProducts(nn.Module):
    """As transformers 4 has it in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv", FREQUENCIES.clone(), persistent=False)

    @torch.no_grad()
    def forward(self, states, position_ids):
        columns = self.inv[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        with torch.autocast(device_type=states.device.type, enabled=False):
            angles = (columns @ position_ids[:, None, :].float()).transpose(1, 2)
            twice = torch.cat((angles, angles), dim=-1)
            return twice.cos().to(states.dtype), twice.sin().to(states.dtype)


class Neighbours(Table):
    def both(self, angles):
        return torch.stack((angles, angles), -1).flatten(-2)


class Once(Table):
    def both(self, angles):
        return angles


class InFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freqs = FREQUENCIES.clone()

    def forward(self, x, where):
        angles = torch.einsum("bs,f->bsf", where.float(), self.freqs.to(where.device)).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class OtherSign(Table):
    def angles(self, positions):
        return -super().angles(positions)


class OneBehind(Table):
    def angles(self, positions):
        return super().angles(positions + 1)


class RoundedPositions(Table):
    def angles(self, positions):
        return super().angles(positions.bfloat16())


class InFloat64(Table):
    def angles(self, positions):
        return positions[..., None].double() * self.freqs.double()


class NoScaleOfSin(Table):
    def forward(self, x, positions):
        cos, sin = super().forward(x, positions)
        return cos, sin / self.scale


class Turned(Table):
    def forward(self, x, positions):
        return super().forward(x, positions)[::-1]


class ByLength(Table):
    def angles(self, positions):
        return super().angles(positions) / (2 if int(positions.max()) > 9 else 1)


class ByWidth(Table):
    def angles(self, positions):
        return super().angles(positions) / (2 if positions.shape[1] > 9 else 1)


class ByLengthOfX(Table):
    def forward(self, x, positions):
        return super().forward(x, positions / (2 if x.shape[-2] > 9 else 1))


class ByRankOfX(Table):
    def forward(self, x, positions):
        return super().forward(x, positions / (2 if x.dim() == 4 else 1))


class RememberingLast(Table):
    last = None

    def angles(self, positions):
        before, self.last = self.last, super().angles(positions)
        return self.last if before is None else before


class ThreeOfThem(Table):
    def forward(self, x, positions):
        return (*super().forward(x, positions), positions)


SERVED = {
    Table: "RotaryEmbedding",
    ByProducts: "RotaryEmbedding",
    Neighbours: "RotaryEmbeddingInterleaved",
    Once: "RotaryEmbeddingHalfWidth",
    InFloat32: "RotaryEmbeddingFloat32",
}
OTHERS = [cls for cls in Table.__subclasses__() if cls not in SERVED]


def in_a_model(table: nn.Module) -> nn.Module:
    return kernels_ext_npu.kernelize(nn.ModuleDict({"rope": copy.deepcopy(table), "head": nn.Linear(2, 2)}).to("npu"))


def x_and_positions(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 5, 16).to(dtype), torch.randint(4000, (2, 5))


def is_ours(table: nn.Module) -> bool:
    """Tell whether it makes each angle once, by the kernel: then cos and sin are halves of one tensor."""
    cos, sin = table(*(each.npu() for each in x_and_positions()))
    return cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()


@pytest.mark.parametrize(("cls", "layer"), SERVED.items(), ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cos_and_sin_are_those_of_the_module_to_the_bit(cls: type[nn.Module], layer: str, dtype) -> None:
    plain = cls()
    model, (x, positions) = in_a_model(plain), x_and_positions(dtype)
    (row,) = rows(model)[:1]
    assert (row.path, row.kernel, row.swapped, row.reason, row.kind) == ("rope", layer, True, None, "rotary tables")
    expected = plain.npu()(x.npu(), positions.npu())  # transcendental functions of another device differ in a bit
    for found, truth in zip(model["rope"](x.npu(), positions.npu()), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=0, atol=0)


def test_it_takes_fewer_launches() -> None:
    plain = Table()
    model, given = in_a_model(plain), [each.npu() for each in x_and_positions()]
    counts = []
    for table in (plain.npu(), model["rope"]):
        npu_counts.reset()
        table(*given)
        counts.append(sum(npu_counts.read().get(name, 0) for name in ("copy_", "mul", "mul_", "cat", "cos", "sin")))
    assert counts == [9, 6]  # positions and both tables cast, three products, cat, cos, sin


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone(cls: type[nn.Module]) -> None:
    model = in_a_model(cls())
    assert not [row for row in rows(model) if row.path == "rope" and row.swapped]
    assert "forward" not in vars(model["rope"])


def test_a_later_change_is_computed() -> None:
    plain = Table()
    model, (x, positions) = in_a_model(plain), x_and_positions(torch.float32)
    given = x.npu(), positions.npu()
    for each in (plain.npu(), model["rope"]):
        each.freqs.mul_(0.5)
    assert is_ours(model["rope"])
    assert torch.equal(model["rope"](*given)[0], plain(*given)[0])
    plain.scale = model["rope"].scale = 2.0
    assert torch.equal(model["rope"](*given)[0], plain(*given)[0])
    assert not is_ours(model["rope"])
    kernels_ext_npu.kernelize(model)
    assert is_ours(model["rope"])
    kernels_ext_npu.restore(model)
    assert not is_ours(model["rope"])


def test_it_is_called_by_names_with_what_it_does_not_read_and_for_other_positions() -> None:
    plain = Table()
    model, (x, positions) = in_a_model(plain), [each.npu() for each in x_and_positions()]
    plain = plain.npu()
    for kwargs in ({"x": x, "positions": positions, "length": 9}, {"x": x, "positions": positions[0]}):
        assert all(map(torch.equal, model["rope"](**kwargs), plain(**kwargs)))
    with pytest.raises(TypeError):
        model["rope"](x, positions, length=1, other=2)


def test_frequencies_that_are_trained_or_of_another_shape_and_an_x_on_another_device_are_computed() -> None:
    plain = Table()
    model, (x, positions) = in_a_model(plain), x_and_positions(torch.float32)
    plain, rope = plain.npu(), model["rope"]
    grads = []
    for table in (plain, rope):
        table.freqs.requires_grad_()
        sum(table(x.npu(), positions.npu())).sum().backward()
        grads.append(table.freqs.grad)
    assert torch.equal(*grads)
    assert all(map(torch.equal, rope(x, positions.npu()), plain(x.npu(), positions.npu())))
    plain.freqs = rope.freqs = torch.rand(5, 8, device="npu")
    assert all(map(torch.equal, rope(x.npu(), positions.npu()), plain(x.npu(), positions.npu())))


def test_autocast_and_frequencies_in_16_bits_decide_what_they_did() -> None:
    for plain in (Table(), ByProducts(), InFloat32()):
        model, (x, positions) = in_a_model(plain), [each.npu() for each in x_and_positions()]
        plain = plain.npu()
        with torch.autocast("npu", torch.bfloat16):
            assert all(map(torch.equal, model["rope"](x, positions), plain(x, positions)))
        model.bfloat16(), plain.bfloat16()
        assert all(map(torch.equal, model["rope"](x, positions), plain(x, positions)))


def test_a_graph_has_it_too() -> None:
    plain = Table()
    model, given = in_a_model(plain), [each.npu() for each in x_and_positions()]
    compiled = torch.compile(model["rope"], backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*given), plain.npu()(*given)))
