"""Cross entropy for Huawei Ascend NPUs: of logits, and of a language model's head without its logits."""

from .distillation import linear_generalized_jsd
from .functional import cross_entropy, linear_cross_entropy
from .log_probs import linear_log_probs, linear_log_probs_and_entropy
from .shard import Shard

__all__ = [
    "Shard",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_generalized_jsd",
    "linear_log_probs",
    "linear_log_probs_and_entropy",
]
