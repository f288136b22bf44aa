"""Proof of the strict variants: each runs on the torch and torch_npu that it names, emulated where they are foreign."""


class ProvingError(Exception):
    """Something that a proof needs is missing; the message says what, and how to get it."""
