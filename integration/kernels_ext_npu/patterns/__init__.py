"""The forwards that our kernels replace, written as transformers writes them.

Each class or function is the documentation of the mathematics, the pattern that those of transformers are compared with
(matching/), and the oracle in the tests. The tuple PATTERNS of its file says which layer of which kernel repository
takes its place, and on which instances.
"""

from importlib import import_module
from pkgutil import walk_packages

from kernels_ext_npu.patterns.pattern import FunctionPattern, Part, Pattern

_files = [import_module(file.name) for file in walk_packages(__path__, f"{__name__}.")]
_all = [pattern for file in _files for pattern in getattr(file, "PATTERNS", ())]
PATTERNS = tuple([pattern for pattern in _all if isinstance(pattern, Pattern)])
FUNCTION_PATTERNS = tuple([pattern for pattern in _all if isinstance(pattern, FunctionPattern)])

__all__ = ["FUNCTION_PATTERNS", "PATTERNS", "FunctionPattern", "Part", "Pattern"]
