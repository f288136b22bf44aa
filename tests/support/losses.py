"""What the losses of CrossEntropy have to give: their formula, written out, in the dtype of the tensors."""

from torch import Tensor
from torch.nn import functional as F


def logits_of(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the logits of a head after scale and softcap."""
    logits = F.linear(hidden_states, weight, bias) * logit_scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def loss_of(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: float | None = None,
) -> Tensor:
    """Return the loss of logits ``[N, V]``, row by row, from the probabilities of all words."""
    counted = labels != ignore_index
    log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
    wanted = F.one_hot(labels.masked_fill(~counted, 0), logits.shape[-1]).to(logits)
    wanted = (1 - label_smoothing) * wanted + label_smoothing / logits.shape[-1]
    rows = -(wanted * log_probs).sum(-1) + z_loss * logits.exp().sum(-1).log().square()
    rows = rows.masked_fill(~counted, 0)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (counted.sum() if num_items is None else num_items)
