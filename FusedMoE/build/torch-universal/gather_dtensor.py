"""DTensors, for which the operators here have no rules.

Experts of transformers see the local part of what is spread over devices: tensor and expert parallelism hand it to
them. Who hands over DTensors themselves gets what one device would compute, of tensors that are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._common.distributed import is_distributed

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate


def call_on_gathered(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Gather DTensors, and call a function of whole tensors with them on every device of their mesh.

    Args:
        function: takes as many tensors as are given, and gives one.
        tensors: DTensors of one mesh, or None.

    Returns:
        The function's result, as a DTensor that every device holds whole.

    Raises:
        TypeError: some of the tensors are not distributed: what part of a whole they are is not known.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(is_distributed(tensor) for tensor in given):
        kinds = [type(tensor).__name__ for tensor in given]
        raise TypeError(f"experts take tensors or DTensors, not both, got {kinds}: distribute all, or call to_local()")
    mesh = given[0].device_mesh
    replicated = [Replicate()] * mesh.ndim
    whole = [None if t is None else t.redistribute(placements=replicated) for t in tensors]
    # with a gradient that every device has whole, too
    gathered = [None if t is None else t.to_local(grad_placements=replicated) for t in whole]
    return DTensor.from_local(function(*gathered), mesh, replicated, run_check=False)
