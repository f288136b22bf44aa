"""Heads under the engines that split a model: they defer their logits, or compute them with a reason."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.distributed import engines, matrix, models
from tests.distributed.models import Tensors
from tests.integration.swaps.loss.models_of_own_code import NanoGPT, batch


def look(
    engine: str, model: str, folder: Path, is_before: bool
) -> tuple[bool, str | None, list[list[int]], Tensor, Tensors]:
    """Take a step, with a look at the logits before or after its backward.

    Returns:
        Whether logits were deferred, why the head is not swapped, the rows of this process, their logits, and all
        gradients.
    """
    with engines.registered(True):
        whole, trained = engines.build(engine, model, folder, True)
        ids = engines.batch(engine, model, 0)
        outputs = trained(ids, labels=ids, use_cache=False)
        is_deferred = isinstance(outputs.logits, DeferredLogits) and outputs.logits.known is None
        looked_at = [outputs.logits.detach().cpu()] if is_before else []
        outputs.loss.backward()
        logits = [*looked_at, outputs.logits.detach().cpu()][0]
        (row,) = (row for row in kernels_ext_npu.report(whole) if row.kind == "heads")
        reason = None if row.swapped else str(row.reason)
        return is_deferred, reason, ids.tolist(), logits, engines.gradients(trained)


WRAPPED = "another library has wrapped its forward"
FLAT = "its weight is a part of another tensor, as under FSDP1"
OWN_UNIT = "FSDPLinear, which may compute something else"


# why a head computes its logits; whether it is tied makes a difference to transformers' own FSDP
@pytest.mark.parametrize(
    ("engine", "model", "reason"),
    [
        pytest.param("DDP", "Qwen3", None, marks=pytest.mark.distributed),
        pytest.param("FSDP2", "Qwen3", None, marks=pytest.mark.distributed),
        ("FSDP2", "Qwen3, tied", None),
        pytest.param("FSDP2, by transformers", "Qwen3", OWN_UNIT, marks=pytest.mark.distributed),
        pytest.param("FSDP2, by transformers", "Qwen3, tied", None, marks=pytest.mark.distributed),
        pytest.param("FSDP1", "Qwen3", FLAT, marks=pytest.mark.distributed),
        pytest.param("FSDP1, flat", "Qwen3, tied", FLAT, marks=pytest.mark.distributed),
        pytest.param("TP", "Qwen3", WRAPPED, marks=pytest.mark.distributed),
        pytest.param("TP", "Qwen3, tied", WRAPPED, marks=pytest.mark.distributed),
    ],
)
def test_logits_wait_or_there_is_a_reason_and_no_gradient_is_missing(
    engine, model, reason, two_ranks, checkpoints, truths
) -> None:
    """Logits that are looked at behind the backward, too, where FSDP has freed the weight."""
    ids, truth = models.tokens(0), truths(model)[0]
    with torch.no_grad():
        expected = models.load(checkpoints(model), attn_implementation="eager")(ids).logits
    for is_before in (True, False):
        for is_deferred, why, rows, logits, found in two_ranks.run(look, engine, model, checkpoints(model), is_before):
            assert why is None if reason is None else reason in str(why)
            assert is_deferred == (why is None)
            gradients = engines.named("gradient", found)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, truth[name], rtol=0, atol=matrix.TOLERANCE, msg=name)
            assert gradients.keys() == truth.keys() - {"loss"}
            places = [ids.tolist().index(row) for row in rows]
            torch.testing.assert_close(logits, expected[places], rtol=0, atol=matrix.TOLERANCE)


def step_of_a_model_of_own_code(engine: str, is_kept: bool) -> tuple[bool, Tensor, Tensors]:
    """Take a step of a model that is none of transformers', alike on both ranks.

    Returns:
        Whether logits were deferred, the logits that were kept, or the loss, and all gradients.
    """
    with engines.registered(True):
        torch.manual_seed(0)
        model: nn.Module = kernels_ext_npu.kernelize(NanoGPT().npu())
        if engine == "DDP":
            model = DistributedDataParallel(model)
        elif engine == "FSDP2":
            fully_shard(model.body.mix)
            fully_shard(model)
        logits, loss = model(*(each.npu() for each in batch()))
        is_deferred = isinstance(logits, DeferredLogits) and logits.known is None
        if not is_kept:
            logits = loss
        loss.backward()
        return is_deferred, logits.detach().cpu(), engines.gradients(model)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_heads_of_own_code_wait_too(engine: str, is_kept: bool, two_ranks) -> None:
    _, expected, truth = step_of_a_model_of_own_code("none", is_kept)
    for is_deferred, found, gradients in two_ranks.run(step_of_a_model_of_own_code, engine, is_kept):
        assert is_deferred
        torch.testing.assert_close(found, expected, rtol=0, atol=matrix.TOLERANCE)
        assert gradients.keys() == truth.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, truth[name], rtol=0, atol=matrix.TOLERANCE, msg=name)
