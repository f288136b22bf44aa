"""Tokens in the order of their experts, grouped products of them, and the same in torch."""
