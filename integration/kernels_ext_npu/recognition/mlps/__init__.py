"""Gated MLPs, recognised by running them."""
