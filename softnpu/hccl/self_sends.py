"""Pair what a rank sends to itself with what it receives from itself, in one block of sends and receives."""

from __future__ import annotations

from collections import defaultdict, deque

from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed import Work


class SelfSends:
    """Keep sends and receives of one rank with itself until their other half is there."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], deque[Tensor]] = defaultdict(deque)

    def add(self, operator: str, tensor: Tensor, tag: int) -> Work:
        """Note the bytes to ``send`` or the memory to ``recv`` into; copy where both are there."""
        other = self._waiting["recv" if operator == "send" else "send", tag]
        if not other:
            self._waiting[operator, tag].append(tensor)
        elif operator == "send":
            other.popleft().copy_(tensor)
        else:
            tensor.copy_(other.popleft())
        return PythonCallbackWork(lambda timeout: True)

    def end(self) -> None:
        """End the block.

        Raises:
            RuntimeError: something was sent that nobody receives, or the other way round.
        """
        left = [f"{operator} of {len(tensors[0])} bytes" for (operator, _), tensors in self._waiting.items() if tensors]
        self._waiting.clear()
        if left:
            raise RuntimeError(f"a rank sends to itself what it receives in the same batch; left over: {left}")
