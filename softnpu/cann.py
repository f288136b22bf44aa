"""Which release of CANN the software device stands for. What that release refuses is refused."""

from __future__ import annotations

from softnpu.argument_checks import require
from softnpu.runtime import cann_version

major, minor, *_ = cann_version().split(".")
CANN = int(major), int(minor)


def require_before(since: tuple[int, int], condition: bool, operator: str, rule: str) -> None:
    """Raise ``RuntimeError`` unless the rule holds, on the releases of CANN before the first that does without it.

    Example:
        >>> require_before((8, 5), x.dim() == 4, "npu_rotary_mul", "the input shape must be 4-dimensional")
    """
    if since > CANN:
        require(condition, operator, f"{rule} (CANN {cann_version()})")
