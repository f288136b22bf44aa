"""The forwards that our kernels replace, written as transformers writes them.

Each class or function is the documentation of the mathematics, the pattern that those of transformers are compared with
(fingerprints.py, and lookup.py in matching/), and the oracle in the tests. Its `Reference` says which layer of which
kernel repository takes its place, and on which instances.
"""

from kernels_ext_npu.references.expert_lists import EXPERT_LISTS
from kernels_ext_npu.references.experts import EXPERTS
from kernels_ext_npu.references.mlps import MLPS
from kernels_ext_npu.references.norms import NORMS
from kernels_ext_npu.references.reference import FunctionReference, Reference
from kernels_ext_npu.references.rotary import ROTARY
from kernels_ext_npu.references.rotary_embedding import ROTARY_EMBEDDINGS
from kernels_ext_npu.references.routers import ROUTERS

REFERENCES = (*NORMS, *MLPS, *ROTARY_EMBEDDINGS, EXPERTS, *EXPERT_LISTS, *ROUTERS)
FUNCTION_REFERENCES = ROTARY

__all__ = ["FUNCTION_REFERENCES", "REFERENCES", "FunctionReference", "Reference"]
