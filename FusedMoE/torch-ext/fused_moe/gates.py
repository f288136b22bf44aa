"""Which gate an experts module computes: the public names of expert_activation.py."""

from .expert_activation import GEGLU, SWIGLU, Gate, forget, is_current
from .expert_activation import recognised_activation as activation_of

__all__ = ["GEGLU", "SWIGLU", "Gate", "activation_of", "forget", "is_current"]
