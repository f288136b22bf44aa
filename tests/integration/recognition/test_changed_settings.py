"""What a module was recognised by is watched: with other settings its class computes."""

import enum
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import kernels_ext_npu
from tests.integration.recognition.blocks import Block, launched, said
from tests.integration.recognition.spellings.other_peoples_longer_mlps import InDictionary, InSequencesNotDropping
from tests.integration.recognition.spellings.other_peoples_mlps import ByConfig, ByModule
from tests.integration.recognition.spellings.other_peoples_norms import (
    WIDTH,
    MetaNorm,
    OlmoNorm,
    RoundedFirstZeroCentred,
)
from tests.support.served import rows


class Constants:
    EPSILON = 1e-5


SETTINGS = SimpleNamespace(epsilon=1e-5)


class NormOfAClass(MetaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + Constants.EPSILON) * self.gain


class NormOfANamespace(MetaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SETTINGS.epsilon) * self.gain


class NormOfADevice(MetaNorm):
    def forward(self, x):
        return super().forward(x) * (2 if x.device.type == "npu" else 1)


@pytest.mark.parametrize(
    ("cls", "holder", "name"), [(NormOfAClass, Constants, "EPSILON"), (NormOfANamespace, SETTINGS, "epsilon")]
)
def test_what_stands_on_another_object_of_its_file_is_watched(registered, monkeypatch, cls, holder, name) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    monkeypatch.setattr(holder, name, 1.0)
    torch.testing.assert_close(model(x), cls.forward(model.part, x))
    assert launched(lambda: kernels_ext_npu.kernelize(model)(x)) == 1
    torch.testing.assert_close(model(x), cls.forward(model.part, x), rtol=1e-5, atol=1e-6)


def test_what_computes_something_else_on_npus_is_left_alone(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(NormOfADevice()).to("npu"))
    assert said(model) == [(None, False)]
    x = torch.randn(2, 5, WIDTH, device="npu")
    torch.testing.assert_close(model(x), 2 * MetaNorm.forward(model.part, x))


def test_another_setting_is_looked_at_again(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(MetaNorm()).to("npu"))
    x = 1e-3 * torch.randn(2, 5, WIDTH, device="npu")
    model.part.epsilon = 0.5
    assert launched(lambda: model(x)) == 0
    expected = MetaNorm.forward(model.part, x)
    torch.testing.assert_close(model(x), expected)
    (row,) = [row for row in rows(model) if row.path == "part"]
    assert not row.swapped
    assert "its settings are others now; kernelize(model)" in row.reason
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(x)) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("other", [lambda self, x: x.relu(), lambda self, x: MetaNorm.forward(self, x) * 2])
def test_a_forward_that_no_kernel_computes_has_a_row_as_long_as_the_kernel_is_there(
    registered, monkeypatch, other
) -> None:
    class Unit(MetaNorm):
        """Under a name that says nothing."""

        def forward(self, x):
            return MetaNorm.forward(self, x)

    model = kernels_ext_npu.kernelize(Block(Unit()).to("npu"))
    assert said(model) == [("RMSNorm", True)]
    monkeypatch.setattr(Unit, "forward", other)
    (row,) = [row for row in rows(model) if row.path == "part"]
    assert (row.kernel, row.swapped) == ("RMSNorm", False)
    assert row.reason.startswith("changed since it was swapped in: no kernel computes what its forward computes")
    kernels_ext_npu.kernelize(model)
    assert "forward" not in vars(model.part)


@pytest.mark.parametrize("owner", ["module", "class"])
def test_what_stands_on_the_class_is_a_setting_too(registered, owner: str) -> None:
    class Norm(MetaNorm):
        has_offset = False

        def forward(self, x):
            gain = 1 + self.gain if self.has_offset else self.gain
            return self._norm(x.float()).type_as(x) * gain

    model = kernels_ext_npu.kernelize(Block(Norm()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    (model.part if owner == "module" else Norm).has_offset = True
    assert launched(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), Norm.forward(model.part, x))


def test_what_a_forward_looks_for_and_is_put_there_later_is_seen(registered) -> None:
    class Norm(MetaNorm):
        def forward(self, x):
            return self._norm(x.float()).type_as(x) * self.gain * getattr(self, "factor", 1.0)

    model = kernels_ext_npu.kernelize(Block(Norm()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    model.part.note = "nobody reads this"
    assert launched(lambda: model(x)) == 1
    model.part.factor = 2.0
    torch.testing.assert_close(model(x), Norm.forward(model.part, x))


class GELU(nn.GELU):
    """A class of one's own, with torch's forward."""


@pytest.mark.parametrize("gelu", [nn.GELU, GELU])
def test_an_activation_of_one_class_and_other_settings_is_another_one(registered, gelu) -> None:
    exact, by_tanh = (Block(ByModule(gelu(approximate=name))) for name in ("none", "tanh"))
    models = [kernels_ext_npu.kernelize(block.to("npu")) for block in (exact, by_tanh)]
    assert [said(model)[0][0] for model in models] == ["ExactGeGLUMLP", "GeGLUMLP"]
    x = 3 * torch.randn(2, 5, WIDTH, device="npu")
    exact.part.activation.approximate = "tanh"
    torch.testing.assert_close(exact(x), ByModule.forward(exact.part, x))
    assert launched(lambda: exact(x)) == 0


def test_who_watches_the_activation_sees_it(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(ByModule()).to("npu"))
    seen = []
    model.part.activation.register_forward_hook(lambda *args: seen.append(args))
    model(torch.randn(2, 5, WIDTH, device="npu"))
    assert len(seen) == 1
    (row,) = [row for row in rows(model) if row.path == "part"]
    assert "hooks watch its activation" in row.reason


def test_a_setting_that_becomes_a_tensor_is_left_to_the_class(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(MetaNorm()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    model.part.epsilon = torch.full((WIDTH,), 0.5, device="npu")
    torch.testing.assert_close(model(x), MetaNorm.forward(model.part, x))


def test_two_dtypes_in_which_a_layer_rounds_otherwise_are_left_to_the_class(registered) -> None:
    model = kernels_ext_npu.kernelize(RoundedFirstZeroCentred().to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    assert launched(lambda: model(x.bfloat16())) == 0
    assert torch.equal(model(x.bfloat16()), RoundedFirstZeroCentred.forward(model, x.bfloat16()))


def test_what_a_configuration_says_later_is_seen(registered) -> None:
    mlp, norm = (kernels_ext_npu.kernelize(cls().to("npu")) for cls in (ByConfig, OlmoNorm))
    x = 1e-3 * torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: mlp(x)) == launched(lambda: norm(x)) == 1
    mlp.config.approximate, norm.config.eps = "tanh", 0.5
    assert launched(lambda: mlp(x)) == launched(lambda: norm(x)) == 0
    torch.testing.assert_close(norm(x), OlmoNorm.forward(norm, x))


def test_a_method_that_its_class_gets_later_is_called(registered, monkeypatch) -> None:
    model = kernels_ext_npu.kernelize(Block(MetaNorm()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    monkeypatch.setattr(MetaNorm, "_norm", lambda self, x: x)
    torch.testing.assert_close(model(x), x * model.part.gain)
    assert said(kernels_ext_npu.kernelize(model)) == [(None, False)]


def scale(x):
    return x.pow(2).mean(-1, keepdim=True)


class NormByHelper(MetaNorm):
    def forward(self, x):
        return (x.float() * torch.rsqrt(scale(x.float()) + 1e-6)).type_as(x) * self.gain


def test_a_function_that_its_file_gets_later_is_called(registered, monkeypatch) -> None:
    model = kernels_ext_npu.kernelize(Block(NormByHelper()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    monkeypatch.setitem(globals(), "scale", lambda x: torch.ones_like(x[..., :1]))
    torch.testing.assert_close(model(x), x * model.part.gain, rtol=1e-5, atol=1e-5)  # the eps is added to 1


def test_a_bias_that_is_given_later_is_added(registered) -> None:
    model = kernels_ext_npu.kernelize(OlmoNorm().to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    model.bias = nn.Parameter(torch.ones(WIDTH, device="npu"))
    torch.testing.assert_close(model(x), OlmoNorm.forward(model, x))


def test_a_run_leaves_a_configuration_as_it_is(registered) -> None:
    class Counting(OlmoNorm):
        def forward(self, x):
            self.config.calls = getattr(self.config, "calls", 0) + 1
            return super().forward(x)

    model = kernels_ext_npu.kernelize(Block(Counting()).to("npu"))
    assert said(model) == [] or not said(model)[0][1]
    assert not hasattr(model.part.config, "calls")


@pytest.mark.parametrize("change", ["activation", "hook", "hook of the container", "container"])
def test_what_changes_in_a_container_is_computed(registered, change: str) -> None:
    model, calls = kernels_ext_npu.kernelize(Block(InSequencesNotDropping()).to("npu")), []
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    gate = model.part.gate
    if change == "activation":
        gate[1] = nn.ReLU()
    elif change == "container":
        model.part.gate = nn.Sequential(gate[0], nn.GELU(approximate="tanh"), nn.Tanh())
    else:
        (gate if "container" in change else gate[1]).register_forward_hook(lambda *_: calls.append(change))
    expected = InSequencesNotDropping.forward(model.part, x)
    assert launched(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), expected)
    assert len(calls) == (3 if "hook" in change else 0)


@pytest.mark.parametrize("change", ["activation", "hook", "dictionary"])
def test_what_changes_in_a_dictionary_is_computed(registered, change: str) -> None:
    model, calls = kernels_ext_npu.kernelize(Block(InDictionary()).to("npu")), []
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    parts = model.part.parts
    if change == "activation":
        parts["act"] = nn.ReLU()
    elif change == "hook":
        parts["act"].register_forward_hook(lambda *_: calls.append(change))
    else:
        model.part.parts = nn.ModuleDict({**dict(parts.items()), "act": nn.Tanh()})
    expected = InDictionary.forward(model.part, x)
    assert launched(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), expected)
    assert len(calls) == (3 if change == "hook" else 0)


class NormOfArguments(MetaNorm):
    """Keeps the arguments of a command line, as Megatron's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.args = Namespace(epsilon=1e-5, layers=2)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.args.epsilon) * self.gain


class NormOfALayout(MetaNorm):
    """Holds what it reads in lists and dictionaries, and as a member of an enumeration."""

    class Side(enum.Enum):
        BOTH = 1
        NONE = 2

    def __init__(self):
        super().__init__()
        self.dims, self.side, self.factors = [-1], self.Side.BOTH, {"of x": [1.0]}

    def forward(self, x):
        wide = self.factors["of x"][0] * (x.float() if self.side is self.Side.BOTH else 2 * x.float())
        return self.gain * (wide * torch.rsqrt(wide.square().mean(self.dims, keepdim=True) + self.epsilon)).to(x.dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.dims.append(-2),
        lambda part: part.factors.update({"of x": [0.01]}),
        lambda part: part.factors["of x"].insert(0, 0.01),
        lambda part: setattr(part, "side", part.Side.NONE),
    ],
    ids=["list", "dictionary", "list in a dictionary", "enumeration"],
)
def test_containers_and_enumerations_are_settings(registered, change: Callable) -> None:
    model = kernels_ext_npu.kernelize(Block(NormOfALayout()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    change(model.part)
    assert launched(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), NormOfALayout.forward(model.part, x))


def test_a_number_of_numpy_is_left_to_the_class_which_compiles_with_it(registered) -> None:
    norm = MetaNorm()
    norm.epsilon = numpy.float64(1e-5)
    model = kernels_ext_npu.kernelize(Block(norm).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    found = torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, MetaNorm.forward(model.part, x))
    assert launched(lambda: model(x)) == 0


class NormThatNotes(MetaNorm):
    def __init__(self):
        super().__init__()
        self.notes = {"lengths": []}

    def forward(self, x):
        self.notes["lengths"].append(x.shape[1])
        return super().forward(x)


def test_a_list_that_a_forward_writes_to_is_left_as_it_is(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(NormThatNotes()).to("npu"))
    assert model.part.notes == {"lengths": []}
    assert said(model) == [(None, False)]
    model(torch.randn(2, 5, WIDTH, device="npu"))
    assert model.part.notes == {"lengths": [5]}


def test_arguments_of_a_command_line_are_settings(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(NormOfArguments()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert launched(lambda: model(x)) == 1
    model.part.args.epsilon = 1.0
    assert launched(lambda: model(x)) == 0
    torch.testing.assert_close(model(x), NormOfArguments.forward(model.part, x))
