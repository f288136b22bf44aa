"""What a collective takes on the links between devices, at their peaks.

Each rank sends its share of a message over all of its links at once: ``(n - 1) / n`` of what n ranks gather, scatter
or exchange, and twice that of what they reduce to all. Between servers it sends what is left of it once those of one
server have shared the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SOURCE = (
    "https://github.com/Ascend/msmodeling/blob/84fec853d6708256ca4fecf143d8b656a3a3496e/tensor_cast/device.py: "
    "A2_INTERCONNECT and A3_INTERCONNECT"
)


@dataclass(frozen=True)
class Links:
    """The network of a device; bandwidths are in bytes a second, in one direction."""

    kind: str  # ``mesh``, a link to each other device of the server, or ``switch``, one for all; a name of `Rates`
    within: float  # of a link
    devices: int  # that are within reach of it: of a server, or of a supernode
    between: float = 25e9  # of the network card of each device, of 200 Gbit/s

    def seconds(self, operator: str, ranks: Sequence[int], size: float) -> float:
        """Return the seconds of a collective: its name in ``torch.distributed``, its ranks, and its message's bytes.

        The message is what is reduced, gathered, scattered or exchanged as a whole; servers have equally many ranks.
        """
        number = len(ranks)
        if number == 1:
            return 0.0
        if operator == "recv":  # from one other
            return size / self.within
        near = max(1, number // len({rank // self.devices for rank in ranks}))
        link = self.within * (near - 1) if self.kind == "mesh" else self.within
        shared = number if operator == "all_to_all" else near
        inside = (near - 1) / shared * size / link if near > 1 else 0.0
        outside = (number - near) / number * size / (1 if operator == "all_to_all" else near) / self.between
        return (2 if operator == "all_reduce" else 1) * (inside + outside)


MESH = Links("mesh", 28e9, 8)  # of a server with 8 devices: 196 GB/s to seven others
SWITCH = Links("switch", 196e9, 768)  # of a die of a 910C, in a supernode of 768 of them
