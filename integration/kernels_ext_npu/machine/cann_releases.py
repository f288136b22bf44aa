"""What older releases of CANN serve less than the newest, and since which release they do: in words, for reports.

The predicates stand in the kernels, beside the calls that they guard, each with its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Release = tuple[int, int]
UNREADABLE: Release = (0, 0)  # for which the narrowest limits hold


@dataclass(frozen=True)
class Limit:
    """Say what releases do less than a later one."""

    since: Release  # the first one without the limit
    before: str  # what the others do, behind their name
    then: str  # what the first one without it does
    span: tuple[Release, Release] | None = None  # the first release with the limit, and the next without; None: all

    def holds(self, release: Release) -> bool:
        """Tell whether a release has the limit."""
        first, end = self.span or (UNREADABLE, self.since)
        return first <= release < end


ROUTING = Limit((8, 3), "routes only 256 experts in groups of eight", "all")
ROUTING_IN_TRAINING = Limit((8, 3), "routes in one launch in inference alone", "in training, too")
EXPERTS = Limit((8, 3), "sums gradients of experts' weights up in float32, at twice their size", "in their own dtype")
EXPERTS_IN_FLOAT32 = Limit((8, 3), "has the host wait for gradients of experts' weights in float32", "for none")
EXPERTS_CHOSEN_IN_FLOAT32 = Limit(
    (9, 0), "leaves gradients of float32 routing weights of experts in 16 bits to torch", "takes them"
)
NORMS_IN_TRAINING = Limit((8, 3), "trains norms with 1 + weight in 16 bits between two casts", "without")
FAST_GELU = Limit((8, 5), "takes the fast GELU in no graph", "in graphs, too")
PACKED_HEADS = Limit((8, 5), "has gradients of packed attention for heads of up to 512", "of up to 768")
ROTATED = Limit((9, 0), "rotates up to 42 heads of 128 of a token together", "any number", (UNREADABLE, (8, 5)))
ROTATED_IN_8_5 = Limit((9, 0), "rotates up to 53 heads of 128 of a token together", "any number", ((8, 5), (9, 0)))
LIMITS = tuple(value for value in list(globals().values()) if isinstance(value, Limit))


def parse_release(version: str | None) -> Release:
    """Return major and minor of a version such as ``8.2.RC1``; UNREADABLE where there is none to read."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else UNREADABLE


def sentence(limit: Limit, release: Release) -> str:
    """Say a limit of a release.

    Example:
        >>> sentence(ROUTING, (8, 2))
        'CANN 8.2 routes only 256 experts in groups of eight; since 8.3 all'
    """
    name = "a CANN whose version cannot be read" if release == UNREADABLE else f"CANN {_written(release)}"
    return f"{name} {limit.before}; since {_written(limit.since)} {limit.then}"


def sentences(release: Release) -> list[str]:
    """Say all that a release does less, and which one to go to for it; nothing of the newest."""
    return [sentence(limit, release) for limit in LIMITS if limit.holds(release)]


def _written(release: Release) -> str:
    return ".".join(map(str, release))
