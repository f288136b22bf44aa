"""Norms, recognised by running them."""
