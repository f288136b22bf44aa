"""Linear layers that are trained, for Huawei Ascend NPUs: alone, and several of one input."""

from .functional import linear, linears

__all__ = ["linear", "linears"]
