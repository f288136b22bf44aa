"""Prove the strict variants: each runs on the torch and torch_npu that it names, emulated where they are foreign."""


class ProvingError(Exception):
    """Say what a proof needs and does not have, and how to get it."""
