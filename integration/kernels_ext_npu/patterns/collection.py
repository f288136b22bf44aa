"""All patterns: those in PATTERNS of every file of this folder."""

from importlib import import_module
from pkgutil import walk_packages

from kernels_ext_npu import patterns
from kernels_ext_npu.patterns.pattern import Pattern

_files = [import_module(file.name) for file in walk_packages(patterns.__path__, f"{patterns.__name__}.")]
_all: list[Pattern] = [pattern for file in _files for pattern in getattr(file, "PATTERNS", ())]
_are_functions = [pattern.is_function for pattern in _all]
PATTERNS = tuple([pattern for pattern, is_function in zip(_all, _are_functions) if not is_function])
FUNCTION_PATTERNS = tuple([pattern for pattern, is_function in zip(_all, _are_functions) if is_function])
