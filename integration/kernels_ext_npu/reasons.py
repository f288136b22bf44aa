"""Reasons: why a module or function keeps what it has, or what there is to say of a kernel that is in place."""

from __future__ import annotations


class Reason(str):
    """A sentence for the report, with a code by which code tells reasons apart: nothing reads a sentence to decide.

    Example:
        >>> reason = Reason("left out", "register(kernels=['RMSNorm']) leaves RoPE out")
        >>> reason.code
        'left out'
        >>> print(reason)
        register(kernels=['RMSNorm']) leaves RoPE out

    Args:
        code: two or three words, one for each kind of reason.
        text: the sentence, for this module.
    """

    code: str

    def __new__(cls, code: str, text: str) -> Reason:
        self = super().__new__(cls, text)
        self.code = code
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # of copies and pickles
        return self.code, str(self)
