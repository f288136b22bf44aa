"""Modules of other people's code that make cos and sin of positions, found by running them.

Such a module holds frequencies, ``[F]``, gets x and positions, ``[B, S]``, and gives cos and sin of their products,
times a number. It has each angle twice, ``[θ0, θ1, ..., θ0, θ1, ...]`` or ``[θ0, θ0, θ1, θ1, ...]``, or once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from kernels_ext_npu.recognition.computed import Computed
from kernels_ext_npu.recognition.module_settings import names_read, numbers
from kernels_ext_npu.recognition.rotations.functions import OPERATORS
from kernels_ext_npu.recognition.rotations.modules import held_tensors, stand_in_function, tensor_names
from kernels_ext_npu.recognition.rotations.signatures import Signature
from kernels_ext_npu.recognition.watched_runs import Watched, attempt, autocast, check_sizes, is_close

_ANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    "RotaryEmbedding": lambda angles: torch.cat((angles, angles), -1),
    "RotaryEmbeddingInterleaved": lambda angles: angles.repeat_interleave(2, -1),
    "RotaryEmbeddingHalfWidth": lambda angles: angles,
}
_IN_FLOAT32 = {"RotaryEmbedding": "RotaryEmbeddingFloat32"}  # of layers, those whose tables are that whatever x is
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FURTHEST = 4096  # position, at which products show how they are rounded


class _Table:
    """A module that may make cos and sin."""

    def __init__(self, module: nn.Module, name: str, signature: Signature) -> None:
        self._compute = stand_in_function(module, (name,), signature)
        self._others = signature.defaults[2:]
        (held,) = held_tensors(module, (name,))
        self.frequencies = torch.rand(len(held))

    def run(self, x: Tensor, positions: Tensor, held: torch.dtype = torch.float32) -> Tensor:
        """Return cos and sin of positions for an x and frequencies of a dtype, in one tensor."""
        watched = Watched(OPERATORS)
        watched.autocast = torch.is_autocast_enabled("cpu")
        with watched:
            made = self._compute(x, positions, *self._others, self.frequencies.to(held))
        if type(made) is not tuple:
            raise TypeError("it returns something else")
        return torch.stack(made)

    def gives(self, layer: str, scale: float, held: torch.dtype) -> set[torch.dtype | None] | None:
        """Return which dtypes it gives for frequencies of one, None for that of x; None if it gives something else."""
        dtypes: set[torch.dtype | None] = set()
        shapes = ((2, 5), (2, 5, 4)), ((1, 1), (1, 2, 1, 4)), ((3, 1), (3, 4))
        for (shape, x_shape), dtype in product(shapes, _DTYPES):
            given = torch.randint(_FURTHEST, shape)
            found = self.run(torch.ones(x_shape, dtype=dtype), given, held)
            angles = _ANGLES[layer](given[..., None].float() * self.frequencies.to(held).float())
            expected = torch.stack((angles.cos(), angles.sin())) * scale
            if not is_close(found, expected.to(found.dtype)):
                return None
            dtypes |= {found.dtype, None} if found.dtype is dtype else {found.dtype}
        return dtypes


def find_rotary_table(module: nn.Module) -> Computed | None:
    """Return the layer that makes the same cos and sin, and the number that they are multiplied with."""
    names, signature = tensor_names(module), Signature(type(module).forward, 1)  # type: ignore[arg-type]
    held = held_tensors(module, names)
    first, *others = signature.defaults
    is_called_so = signature.is_plain and first in (None, inspect.Parameter.empty) and len(others) in (1, 2)
    if not is_called_so or len(names) != 1 or held[0].dim() != 1:
        return None
    table = _Table(module, names[0], signature)
    x, origin = torch.ones(2, 3), torch.zeros(1, 1, dtype=torch.int64)
    solved = float(table.run(x, origin)[0].flatten()[0])
    scale = next((each for each in (1.0, *numbers(module, float)) if abs(each - solved) <= 1e-6 * abs(solved)), None)
    for layer in _ANGLES if scale is not None else ():
        dtypes = attempt(table.gives, layer, scale, torch.float32)
        if dtypes is None:
            continue
        if dtypes == {None, *_DTYPES}:
            made: str | None = layer
        else:
            made = _IN_FLOAT32.get(layer) if dtypes == {None, torch.float32} else None
        if made is None:
            return None
        check_sizes(lambda given: table.run(given, given[..., 0].long()), 5, 7, 3)
        positions = torch.randint(_FURTHEST, (2, 5))
        with autocast(True):
            cast = attempt(table.run, x, positions)
        # einsum makes a product of angles, which autocast of an NPU casts, and that of the CPU does not see
        is_product = "einsum" in names_read(type(module), type(module).forward)  # type: ignore[arg-type]
        numbers_read = (("attention_scaling", scale),)
        return Computed(
            made,
            parameters=(("inv_freq", names[0]),),
            numbers=numbers_read,
            casts=not is_product and cast is not None and torch.equal(cast, table.run(x, positions)),
            wants_one_dtype=attempt(table.gives, layer, scale, torch.bfloat16) != dtypes,
        )
    return None
