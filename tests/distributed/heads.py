"""A step of a model whose head is asked to defer its logits, and a look at them. Runs in the processes."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.distributed import engines, models
from tests.distributed.models import Tensors


@dataclass
class Looked:
    """What one process found.

    Attributes:
        is_deferred: whether the logits were not computed by the model.
        reason: why the report says that the head is not swapped; None if it is.
        rows: which rows of the batch this process had.
        logits: of these rows.
        gradients: of the weights of the head and the embedding, over all processes.
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
