"""Finders: a new kind of kernel is one entry of one list, and everything else goes by what it decides."""

from collections.abc import Iterator
from functools import partial

import kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import Kind
from kernels_ext_npu.swaps import finders
from kernels_ext_npu.swaps.decision import Decision, Finder, View, bind_forwards
from tests.support import zoo
from tests.support.served import rows

KIND, LAYER = Kind("embeddings", (), "embeddings"), "Lookup"


def lookup(self: nn.Embedding, input: Tensor) -> Tensor:
    """Look words up by a product with their one-hot rows, which nobody would want."""
    return F.one_hot(input, self.num_embeddings).to(self.weight.dtype) @ self.weight


def find(view: View) -> Iterator[Decision]:
    for path, module in view.instances([cls for cls in view.by_class if issubclass(cls, nn.Embedding)]):
        is_there = getattr(vars(module).get("forward"), "__func__", None) is lookup
        reason = "it has a norm of its own" if module.max_norm else None
        yield Decision(path, module, LAYER, reason, LAYER if is_there else None, kind=KIND, make=lambda: lookup)


@pytest.fixture
def model(registered, monkeypatch) -> PreTrainedModel:
    """A model of a process in which one more kind of kernel is known."""
    entry = Finder("embeddings", find, partial(bind_forwards, "embeddings"))
    monkeypatch.setattr(finders, "FINDERS", (*finders.FINDERS, entry))
    return zoo.build("qwen3").to("npu")


def said(model: PreTrainedModel) -> tuple[str | None, bool, str | None]:
    (row,) = rows(model, KIND.in_models)
    return row.kernel, row.swapped, row.reason


@torch.no_grad()
def test_a_new_kind_is_put_in_reported_and_taken_out_by_one_entry(model) -> None:
    expected = zoo.logits("qwen3", model)
    assert "kernelize(model)" in said(model)[2]
    kernels_ext_npu.kernelize(model)
    assert said(model) == (LAYER, True, None)
    assert model.get_input_embeddings().forward.__func__ is lookup
    assert torch.allclose(zoo.logits("qwen3", model), expected, rtol=1e-4, atol=1e-4)  # float32, of two layers
    kernels_ext_npu.restore(model)
    assert said(model)[:2] == (LAYER, False)
    assert "forward" not in vars(model.get_input_embeddings())


def test_what_speaks_against_it_later_is_reported_and_looked_at_again(model) -> None:
    kernels_ext_npu.kernelize(model).get_input_embeddings().max_norm = 1.0
    kernel, swapped, reason = said(model)
    assert (kernel, swapped) == (LAYER, False)
    assert reason == "changed since it was swapped in: it has a norm of its own; kernelize(model) takes the kernel out"
    kernels_ext_npu.kernelize(model)
    assert said(model) == (LAYER, False, "it has a norm of its own")


def test_strict_registration_refuses_what_a_new_kind_refuses(model) -> None:
    kernels_ext_npu.register(strict=True)
    model.get_input_embeddings().max_norm = 1.0
    with pytest.raises(RuntimeError, match=r"model.embed_tokens \(Embedding\): it has a norm of its own"):
        kernels_ext_npu.kernelize(model)


def test_a_class_that_is_marked_after_a_report_is_in_the_next_one(registered) -> None:
    class Scale(nn.Module):
        """Of no kind, until somebody says which."""

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = nn.Sequential(Scale(), nn.Linear(2, 2)).to("npu")
    assert not rows(model, "norms")
    kernels.use_kernel_forward_from_hub("RMSNorm")(Scale)
    assert [row.class_name for row in rows(model, "norms")] == ["Scale"]
