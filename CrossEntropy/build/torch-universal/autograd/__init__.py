"""Losses as nodes of autograd: what each keeps for its backward, and in which chunks it computes."""
