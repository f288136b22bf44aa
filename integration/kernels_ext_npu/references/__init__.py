"""The forwards that our kernels replace, written as transformers writes them.

Each class or function is the documentation of the mathematics, the pattern that those of transformers are compared with
(fingerprints.py), and the oracle in the tests. Its `Reference` says which layer of which kernel repository takes its
place, and on which instances. A file of this folder is found by itself.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from kernels_ext_npu.references.reference import FunctionReference, Reference

Kind = TypeVar("Kind", Reference, FunctionReference)


def _all(kind: type[Kind]) -> Iterator[Kind]:
    for file in iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{file.name}")).values():
            yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, kind))


REFERENCES = tuple(dict.fromkeys(_all(Reference)))
FUNCTION_REFERENCES = tuple(dict.fromkeys(_all(FunctionReference)))

__all__ = ["FUNCTION_REFERENCES", "REFERENCES", "FunctionReference", "Reference"]
