"""Norms and gated MLPs of other people's code are served because of what they compute, in whatever words."""

import copy

import peft
import pytest
import torch
from torch import nn

import kernels_ext_npu
import softnpu
from tests.integration.matching.other_peoples_code import (
    INNER,
    LIKE_MLPS,
    LIKE_NORMS,
    MLPS,
    NORMS,
    WIDTH,
    ByModule,
    Helped,
    MetaMLP,
    MetaNorm,
)
from tests.support.served import rows

SERVED = NORMS | MLPS
OPERATORS = ("npu_rms_norm", "npu_gemma_rms_norm", "npu_swiglu", "npu_geglu")


class Block(nn.Module):
    """Holds a module somewhere in a model."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("place", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def launched(call) -> int:
    softnpu.reset_counters()
    call()
    return sum(softnpu.counters().get(name, 0) for name in OPERATORS)


def said(model: nn.Module) -> list[tuple[str | None, bool]]:
    return [(row.kernel, row.swapped) for row in rows(model) if row.path == "part"]


@pytest.fixture(params=SERVED, ids=lambda cls: cls.__name__)
def served(request, registered) -> tuple[Block, Block]:
    """A block with kernels on the NPU, and its plain twin on the CPU."""
    torch.manual_seed(0)
    plain = Block(request.param())
    return kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu")), plain


def test_it_is_served_by_the_layer_that_computes_the_same(served) -> None:
    model, plain = served
    x = torch.randn(2, 5, WIDTH)
    assert said(model) == [(SERVED[type(plain.part)], True)]
    assert launched(lambda: model(x.npu())) == 1
    torch.testing.assert_close(model(x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-5)  # sums of float32 in another order


def products(call) -> int:
    softnpu.reset_counters()
    call()
    return sum(count for name, count in softnpu.counters().items() if name in ("mm", "addmm", "linear", "matmul"))


def test_gate_and_up_are_one_product(registered) -> None:
    model = Block(MetaMLP()).to("npu")
    x = torch.randn(2, 5, WIDTH, device="npu")
    assert products(lambda: model(x)) == 3
    kernels_ext_npu.kernelize(model)
    assert products(lambda: model(x)) == 2


def test_its_gradients_are_those_of_its_own_forward(served) -> None:
    model, plain = served
    x = torch.randn(2, 5, WIDTH)
    ours, theirs = x.npu().requires_grad_(), x.clone().requires_grad_()
    model(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)  # of sums of a hundred squares
    for mine, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_near_to_float64_as_its_own_forward(served, dtype) -> None:
    model, plain = served
    x = torch.randn(2, 5, WIDTH).to(dtype)
    model, rounded = model.to(dtype), copy.deepcopy(plain).to(dtype)
    truth = copy.deepcopy(rounded).double()(x.double())
    ours, theirs = (result.double() - truth for result in (model(x.npu()).cpu(), rounded(x)))
    # kernels round once, at the end: by half a unit at most
    assert ours.norm() <= theirs.norm() + torch.finfo(dtype).eps / 2 * truth.norm()


@pytest.mark.parametrize("cls", [*LIKE_NORMS, *LIKE_MLPS], ids=lambda cls: cls.__name__)
def test_what_only_looks_like_one_is_left_alone(registered, cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    assert all(not swapped for _, swapped in said(model))
    assert "forward" not in vars(model.part)


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


def test_adapters_that_are_put_on_it_later_are_computed(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(Helped()).to("npu"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["w1", "w2", "w3"], r=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    plain = kernels_ext_npu.restore(copy.deepcopy(adapted))
    x = torch.randn(2, 5, WIDTH, device="npu")
    torch.testing.assert_close(adapted(x), plain(x), rtol=1e-5, atol=1e-4)  # of sums of some hundred numbers
    kernels_ext_npu.kernelize(adapted)
    torch.testing.assert_close(adapted(x), plain(x), rtol=1e-5, atol=1e-4)


def test_who_watches_the_activation_sees_it(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(ByModule()).to("npu"))
    seen = []
    model.part.activation.register_forward_hook(lambda *args: seen.append(args))
    model(torch.randn(2, 5, WIDTH, device="npu"))
    assert len(seen) == 1
    (row,) = [row for row in rows(model) if row.path == "part"]
    assert "hooks watch its activation" in row.reason


def test_it_is_taken_out_and_a_copy_keeps_it(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(MetaMLP()).to("npu"))
    twin = copy.deepcopy(model)
    x = torch.randn(2, 5, WIDTH, device="npu")
    kernels_ext_npu.restore(model)
    assert launched(lambda: model(x)) == 0
    assert launched(lambda: twin(x)) == 1
    assert torch.equal(twin(x), kernels_ext_npu.kernelize(model)(x))


def test_a_model_without_weights_is_served_too(registered) -> None:
    with torch.device("meta"):
        model = kernels_ext_npu.kernelize(Block(MetaMLP()))
    assert said(model) == [("SwiGLUMLP", True)]
    assert model.part.w1.weight.is_meta
    assert model.part.w1.out_features == INNER


def test_what_surrounds_a_model_is_neither_seen_nor_changed(registered) -> None:
    class Norm(MetaNorm):
        """A class that no other test has made known."""

    class MLP(MetaMLP):
        """The same."""

    state, npu_state = torch.get_rng_state(), torch.npu.get_rng_state()
    with torch.device("meta"), torch.inference_mode():
        blocks = [kernels_ext_npu.kernelize(Block(part())) for part in (Norm, MLP)]
    assert [said(block)[0][1] for block in blocks] == [True, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.npu.get_rng_state(), npu_state)


def test_a_module_without_numbers_that_is_there_for_something_else_is_not_run(registered) -> None:
    calls = []

    class Recording(nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return x

    kernels_ext_npu.report(kernels_ext_npu.kernelize(Block(Recording()).to("npu")))
    assert not calls


def test_a_model_is_reported_once_kernels_are_unregistered(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(Helped()).to("npu"))
    kernels_ext_npu.unregister()
    assert said(model) == [("SwiGLUMLP", True)]
    kernels_ext_npu.restore(model)
    assert said(model) == [("SwiGLUMLP", False)]


def test_a_setting_that_becomes_a_tensor_is_left_to_the_class(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(MetaNorm()).to("npu"))
    x = torch.randn(2, 5, WIDTH, device="npu")
    model.part.epsilon = torch.full((WIDTH,), 0.5, device="npu")
    torch.testing.assert_close(model(x), MetaNorm.forward(model.part, x))
