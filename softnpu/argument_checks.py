"""Check the arguments of an operator. Every refusal names the operator, what was given and the rule."""

from __future__ import annotations

from torch import Tensor, bfloat16, dtype, float16, float32

FLOATING = (float16, bfloat16, float32)


def require(condition: bool, operator: str, rule: str) -> None:
    """Raise ``RuntimeError``, as torch_npu does, unless the rule holds."""
    if not condition:
        raise RuntimeError(f"{operator}: {rule}")


def describe(tensor: Tensor) -> str:
    """Write the dtype and shape of a tensor for an error: ``float16 [2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def require_dtypes(operator: str, allowed: set[tuple[dtype, ...]], **tensors: Tensor) -> None:
    """Raise ``RuntimeError`` unless the dtypes of the tensors, in order, are one of the allowed combinations."""
    found = tuple(tensor.dtype for tensor in tensors.values())
    if found not in allowed:
        names = ", ".join(tensors)
        options = "; ".join(", ".join(str(d).removeprefix("torch.") for d in pair) for pair in sorted(allowed, key=str))
        given = ", ".join(str(d).removeprefix("torch.") for d in found)
        require(False, operator, f"({names}) of dtypes ({given}); the device takes ({options})")
