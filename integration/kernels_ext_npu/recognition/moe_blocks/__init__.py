"""Blocks with a list of experts, recognised by running them."""
