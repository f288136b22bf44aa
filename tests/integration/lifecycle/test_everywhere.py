"""register(everywhere=True): models that others load, and libraries that have put their own kernels in."""

import copy
import functools
import logging
from collections.abc import Iterator

import pytest
import torch
import torch_npu
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

import kernels_ext_npu
from tests.support import pages, zoo
from tests.support.served import swapped

LOGGER = logging.getLogger("kernels_ext_npu")
WAITS = "swapped in when the model is first called on the NPU"


@pytest.fixture(autouse=True)
def everywhere() -> None:
    kernels_ext_npu.register(everywhere=True)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What this package logs in a test, from the level of its logger on, which is its own again behind it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    level = LOGGER.level
    yield records
    LOGGER.setLevel(level)
    LOGGER.removeHandler(handler)


INPUTS = zoo.inputs("qwen3", zoo.build("qwen3"))


def call(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(**{key: value.to(device) for key, value in INPUTS.items()}).logits.detach().cpu()


def reasons(model: nn.Module, class_name: str) -> set[str | None]:
    found = {row.reason for row in kernels_ext_npu.report(model) if row.class_name == class_name}
    assert found
    return found


def rms_norm_npu(self, x):
    return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]


def rotary_npu(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)


def test_a_model_that_others_load_and_move_is_swapped_when_it_is_called(npu_counters) -> None:
    model = zoo.build("qwen3")
    call(model)  # on the CPU, where it waits
    assert {(row.swapped, row.reason) for row in kernels_ext_npu.report(model)} == {(False, WAITS)}
    model.to("npu")
    rows = [row for row in kernels_ext_npu.report(model) if row.kind != "attention"]  # which is taken with the device
    assert {(row.swapped, row.reason) for row in rows} == {(False, WAITS)}
    torch.testing.assert_close(call(model), call(zoo.build("qwen3")), rtol=1e-5, atol=1e-5)  # float32, other order
    assert {(row.swapped, row.reason) for row in kernels_ext_npu.report(model)} == {(True, None)}
    assert {key: npu_counters()[key] for key in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul")} == {
        "npu_rms_norm": 9,
        "npu_swiglu": 2,
        "npu_rotary_mul": 4,
    }
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks


@pytest.mark.parametrize(("rank", "level"), [("0", logging.WARNING), ("3", logging.DEBUG)])
def test_the_report_is_logged_once_by_the_first_process(logged, monkeypatch, rank, level) -> None:
    monkeypatch.setenv("RANK", rank)
    LOGGER.setLevel(logging.DEBUG)
    model = zoo.build("qwen3").to("npu")
    call(model)
    call(model)
    (record,) = logged
    assert record.levelno == level
    assert str(kernels_ext_npu.report(model)) in record.getMessage()


def test_the_lines_of_the_page_on_logging_silence_the_report(logged) -> None:
    exec(pages.read(pages.DOCS / "environment.md").code("Logging"), {})
    call(zoo.build("qwen3").to("npu"))
    assert not logged


def test_a_forward_that_is_not_called_through_the_model_swaps_the_whole_model() -> None:
    """As adapters of old releases of peft do."""
    model = zoo.build("qwen3").to("npu")
    model.forward(**{key: value.npu() for key, value in INPUTS.items()})
    assert swapped(model) == {True}
    assert model._use_kernels


def test_adapters_are_in_place_before_the_kernels() -> None:
    model = get_peft_model(zoo.build("qwen3"), LoraConfig(target_modules=["up_proj"])).to("npu")
    call(model)
    assert swapped(model) == {True}
    assert reasons(model, "Qwen3MLP") == {"two products, since a projection is a peft.tuners.lora.layer.Linear"}


def test_a_copy_of_a_waiting_model_waits_for_its_first_call_too() -> None:
    model = zoo.build("qwen3").to("npu")
    other = copy.deepcopy(model)
    call(model)
    assert {row.reason for row in kernels_ext_npu.report(other) if row.kind == "norms"} == {WAITS}
    call(other)
    assert swapped(other) == {True}


def test_restore_before_the_first_call_leaves_a_model_out() -> None:
    model = kernels_ext_npu.restore(zoo.build("qwen3").to("npu"))
    call(model)
    assert swapped(model) == {False}


def test_unregister_leaves_models_that_still_wait_without_kernels() -> None:
    waiting = zoo.build("qwen3").to("npu")
    copied = copy.deepcopy(waiting)
    kernels_ext_npu.unregister()
    later = zoo.build("qwen3").to("npu")
    for model in (waiting, copied, later):
        call(model)
        assert swapped(model) == {False}
        assert not model._forward_pre_hooks


def test_unregister_keeps_a_wrapper_that_another_library_put_around_init() -> None:
    ours = PreTrainedModel.__init__
    theirs = functools.wraps(ours)(lambda *args, **kw: ours(*args, **kw))
    PreTrainedModel.__init__ = theirs
    try:
        kernels_ext_npu.unregister()
        assert PreTrainedModel.__init__ is theirs
        assert not zoo.build("qwen3")._forward_pre_hooks
    finally:  # what stood there before ours: a fixture would put ours back
        PreTrainedModel.__init__ = ours.__wrapped__


def test_strict_raises_at_the_first_call(monkeypatch) -> None:
    kernels_ext_npu.register(strict=True, everywhere=True)
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", rms_norm_npu)
    with pytest.raises(RuntimeError, match="9 modules and functions stay as they were"):
        call(zoo.build("qwen3").to("npu"))


def test_kernels_that_were_not_wanted_are_not_promised() -> None:
    kernels_ext_npu.register(kernels=["RMSNorm"], everywhere=True)
    model = zoo.build("qwen3")
    assert WAITS not in reasons(model, "Qwen3MLP") | reasons(model, "apply_rotary_pos_emb")
    call(model.to("npu"))
    assert reasons(model, "Qwen3RMSNorm") == {None}
    assert {row.swapped for row in kernels_ext_npu.report(model) if row.kind != "norms"} == {False}


def test_a_compiled_model_is_swapped_before_it_is_compiled(npu_counters) -> None:
    model = zoo.build("qwen3").to("npu")
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(call(compiled), call(zoo.build("qwen3")), rtol=1e-5, atol=1e-5)
    assert swapped(model) == {True}
    assert npu_counters()["npu_rms_norm"] == 9


# ---- libraries with kernels of their own ----------------------------------------------------------------------------
def test_a_class_whose_forward_was_replaced_is_kept_and_the_library_named(monkeypatch) -> None:
    """verl replaces forwards of norms so, and ms-swift those of MLPs, of classes that were matched before."""
    call(zoo.build("qwen3").to("npu"))
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", rms_norm_npu)
    model = zoo.build("qwen3").to("npu")
    call(model)
    assert model.model.norm.forward.__func__ is rms_norm_npu
    assert reasons(model, "Qwen3RMSNorm") == {f"another library replaced its forward: {__name__}.rms_norm_npu"}
    assert reasons(model, "Qwen3MLP") == {None}


def test_a_rotary_function_that_was_replaced_is_kept_and_the_library_named(monkeypatch) -> None:
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotary_npu)
    model = zoo.build("qwen3").to("npu")
    call(model)
    assert modeling_qwen3.apply_rotary_pos_emb is rotary_npu
    assert reasons(model, "rotary_npu") == {f"another library replaced it: {__name__}.rotary_npu"}


def test_what_is_swapped_below_a_replaced_forward_is_reported_with_a_doubt(monkeypatch) -> None:
    """A block that multiplies with the weights of its experts never calls them."""
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, "forward", lambda self, x: self.experts.own(x))
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "own", lambda self, x: x, raising=False)
    model = zoo.build("qwen3_moe").to("npu")
    call(model)
    (reason,) = reasons(model, "Qwen3MoeExperts")
    assert reason is not None
    assert reason.startswith("but another library replaced the forward around it, and may not call it: test_everywhere")
