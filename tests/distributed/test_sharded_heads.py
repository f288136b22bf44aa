"""Heads under the engines that split a model: they defer their logits, or compute them with a reason."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed import heads, matrix, models
from tests.distributed.models import Tensors

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


def assert_right(found: heads.Looked, logits: Tensor, gradients: Tensors) -> None:
    for name, expected in gradients.items():
        torch.testing.assert_close(found.gradients[name], expected, rtol=0, atol=matrix.TOLERANCE, msg=name)
    torch.testing.assert_close(found.logits, logits, rtol=0, atol=matrix.TOLERANCE)


@pytest.mark.parametrize(("engine", "tied"), SETUPS)
def test_logits_wait_or_there_is_a_reason_and_no_gradient_is_missing(engine, tied, two_ranks, folders) -> None:
    """Logits that are looked at behind the backward, too, where FSDP has freed the weight."""
    logits, gradients = heads.truth(folders[tied])
    assert gradients.keys() == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    for is_before in (True, False):
        for found in two_ranks.run(heads.look, engine, folders[tied], is_before):
            reason = REASONS[engine, tied]
            assert found.reason is None if reason is None else reason in str(found.reason)
            assert found.is_deferred == (found.reason is None)
            assert_right(
                found, logits[[models.tokens(0).tolist().index(row) for row in found.rows.tolist()]], gradients
            )
