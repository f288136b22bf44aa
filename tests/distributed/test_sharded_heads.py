"""Heads under the engines that split a model: they defer their logits, or compute them with a reason."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.distributed import engines, matrix, models
from tests.distributed.models import Tensors


@dataclass
class Looked:
    """What one process found: whether logits were deferred, why the head is not swapped, and logits of its rows.

    The gradients are of the weights of the head and the embedding, over all processes.
    """

    is_deferred: bool
    reason: str | None
    rows: Tensor
    logits: Tensor
    gradients: Tensors


def look(engine: str, folder: Path, is_before: bool) -> Looked:
    """Take a step, with a look at the logits before or after its backward."""
    with engines.registered(True):
        whole, trained = engines.build(engine, "Qwen3", folder, True, "off")
        ids = engines.batch(engine, "Qwen3", 0)
        outputs = trained(ids, labels=ids, use_cache=False)
        is_deferred = isinstance(outputs.logits, DeferredLogits) and outputs.logits.known is None
        looked_at = [outputs.logits.detach().cpu()] if is_before else []
        outputs.loss.backward()
        logits = [*looked_at, outputs.logits.detach().cpu()][0]
        (row,) = (row for row in kernels_ext_npu.report(whole) if row.kind == "heads")
        found = engines.gradients(trained)
        gradients = {name: found[name] for name in found if "embed_tokens" in name or "lm_head" in name}
        return Looked(is_deferred, None if row.swapped else str(row.reason), ids.cpu(), logits, gradients)


def truth(folder: Path) -> tuple[Tensor, Tensors]:
    """The logits of the whole batch and the same gradients, of one process on the CPU without kernels."""
    assert not dist.is_initialized()
    model = models.load(folder, attn_implementation="eager")
    ids = models.tokens(0)
    outputs = model(ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    named = model.named_parameters()
    gradients = {name: p.grad for name, p in named if ("embed_tokens" in name or "lm_head" in name)}
    return outputs.logits.detach(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


WRAPPED = "another library has wrapped its forward"
FLAT = "its weight is a part of another tensor, as under FSDP1"
OWN_UNIT = "FSDPLinear, which may compute something else"
# why a head computes its logits; whether its head is tied makes a difference to transformers' own FSDP
REASONS: dict[tuple[str, bool], str | None] = {
    ("DDP", False): None,
    ("FSDP2", False): None,
    ("FSDP2", True): None,
    ("FSDP2, by transformers", False): OWN_UNIT,
    ("FSDP2, by transformers", True): None,
    ("FSDP1", False): FLAT,
    ("FSDP1, flat", True): FLAT,
    ("TP", False): WRAPPED,
    ("TP", True): WRAPPED,
}
IN_SHORT = {("FSDP2", True)}
SETUPS = [pytest.param(*key, marks=() if key in IN_SHORT else pytest.mark.distributed) for key in REASONS]


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory) -> dict[bool, Path]:
    """Qwen3, with a head of its own and with a tied one."""
    untied, folder = checkpoints["Qwen3"], tmp_path_factory.mktemp("tied")
    weights = models.load(untied).state_dict()
    del weights["lm_head.weight"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(untied, tie_word_embeddings=True))
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    model.save_pretrained(folder)
    return {False: untied, True: folder}


def assert_right(found: Looked, logits: Tensor, gradients: Tensors) -> None:
    for name, expected in gradients.items():
        torch.testing.assert_close(found.gradients[name], expected, rtol=0, atol=matrix.TOLERANCE, msg=name)
    torch.testing.assert_close(found.logits, logits, rtol=0, atol=matrix.TOLERANCE)


@pytest.mark.parametrize(("engine", "tied"), SETUPS)
def test_logits_wait_or_there_is_a_reason_and_no_gradient_is_missing(engine, tied, two_ranks, folders) -> None:
    """Logits that are looked at behind the backward, too, where FSDP has freed the weight."""
    logits, gradients = truth(folders[tied])
    assert gradients.keys() == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    for is_before in (True, False):
        for found in two_ranks.run(look, engine, folders[tied], is_before):
            reason = REASONS[engine, tied]
            assert found.reason is None if reason is None else reason in str(found.reason)
            assert found.is_deferred == (found.reason is None)
            assert_right(
                found, logits[[models.tokens(0).tolist().index(row) for row in found.rows.tolist()]], gradients
            )
