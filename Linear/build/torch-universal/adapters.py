"""Adapters of low rank, and the products that they are made of.

The scale is applied to what an adapter's first factor gives, which is small. An adapter may be float32 beside layers of
16 bits, as peft makes them: then its products are float32, and what it adds is rounded with what it is added to. Large
inputs and gradients of bfloat16 are not cast for that: ``split_bf16.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common import split_bf16
from .projections import QuantizedWeight, Weight, as_matrix


class Adapter(NamedTuple):
    """An adapter of low rank, which adds ``scale * x @ aᵀ @ bᵀ``.

    Attributes:
        a: ``[R, H]``, of the dtype of the layer or float32.
        b: ``[N, R]``, of the same dtype.
        scale: a factor.
        x: what it multiplies, ``[..., H]``, such as what a dropout of another kind gives; None for the input itself.
        p: the probability with which each element of the input of the layer is dropped, and the others are multiplied
            by ``1 / (1 - p)``. An ``x`` of its own is taken as it is.
    """

    a: Tensor
    b: Tensor
    scale: float
    x: Tensor | None = None
    p: float = 0.0


def lora_reference(x: Tensor, weight: Weight, bias: Tensor | None, *adapters: Adapter) -> Tensor:
    """Compute a linear layer with adapters by operators of torch, as peft does."""
    if isinstance(weight, QuantizedWeight):
        y = F.linear(x.to(weight.dtype), as_matrix(weight), bias).to(x.dtype)
    else:
        y = F.linear(x, weight, bias)
    dtype = y.dtype
    for adapter in adapters:
        own = adapter_input(adapter, x)
        given = (x if own is None else own).to(adapter.a.dtype)
        y = y + F.linear(F.linear(given, adapter.a), adapter.b) * adapter.scale
    return y.to(dtype)


def adapter_input(adapter: Adapter, x: Tensor) -> Tensor | None:
    """Return what an adapter multiplies in the place of the layer's input, which may have to be drawn; None if that."""
    return F.dropout(x.to(adapter.a.dtype), adapter.p) if adapter.x is None and adapter.p else adapter.x


def as_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is multiplied with factors of a dtype in the place of a matrix: itself where that takes no cast."""
    return x if split_bf16.takes(x, dtype) else x.to(dtype)


def scaled_product(left: Tensor, right: Tensor, scale: float = 1, out: Tensor | None = None) -> Tensor:
    """Compute ``scale * left @ right`` of two matrices, into ``out`` where that is given.

    It is one call where both are of one dtype, and what comes out is small: CANN multiplies it by the scale behind the
    product. Beside an :func:`as_operand` of bfloat16 a factor is float32.
    """
    if left.dtype is not right.dtype:
        product = split_bf16.mixed_product(left, right, out)
        return product if scale == 1 else product.mul_(scale)
    if scale == 1:
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    nothing = left.new_empty(1)  # times beta = 0: it is not read
    return torch.addmm(nothing, left, right, beta=0, alpha=scale, **({} if out is None else {"out": out}))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to a matrix, in place.

    CANN's ``aclnnInplaceAddmm`` would write a product of 16 bits in float32, cast what it is added to, and their sum
    back (ops-nn, matmul/mat_mul_v3/op_host/op_api/aclnn_addmm.cpp): 28 bytes an element, where these two calls move 8.
    """
    total.add_(torch.mm(left, right))
