"""The functions of all repositories, those of a family in a file of its own."""

from __future__ import annotations

from importlib import import_module

FAMILIES = ("norms", "rotary", "experts", "attention", "losses", "linear_attention", "linear_layers")
FUNCTIONS = tuple(function for family in FAMILIES for function in import_module(f"{__name__}.{family}").FUNCTIONS)
