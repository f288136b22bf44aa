"""The forwards that our kernels replace, written as transformers writes them.

Each class is the documentation of the mathematics, the pattern that transformers' classes are compared with
(matching.py), and the oracle in the tests. Its `Reference` says which layer of which kernel repository takes its place,
and on which instances.
"""

from kernels_ext_npu.references.mlps import MLPS
from kernels_ext_npu.references.norms import NORMS
from kernels_ext_npu.references.reference import Reference

REFERENCES = NORMS + MLPS

__all__ = ["REFERENCES", "Reference"]
