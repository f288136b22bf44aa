"""Blocks whose experts are a list of modules: the public names of experts/expert_lists.py."""

from .experts.expert_lists import ListedExperts, fused_listed_experts, remember_forward, unfit
from .experts.expert_lists import fusable_experts as experts_of

__all__ = ["ListedExperts", "experts_of", "fused_listed_experts", "remember_forward", "unfit"]
