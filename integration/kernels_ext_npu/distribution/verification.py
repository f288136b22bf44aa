"""Check the variants of a kernel repository against their ``metadata.json``.

`kernels` does not check it when it loads one. Everything that is wrong is listed, each with the file that it concerns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels import Metadata

from kernels_ext_npu.distribution.kernels_internals import need
from kernels_ext_npu.distribution.variants import METADATA, identity, published_files, render

Digest, DigestAlgorithm = need("kernels._rust.Digest"), need("kernels._rust.DigestAlgorithm")
DigestValidationError = need("kernels._rust.DigestValidationError")
DigestViolation = need("kernels._rust.DigestViolation")
parse_variant = need("kernels.variants.parse_variant")
SIGNATURE = "metadata.json.sigstore"


@dataclass
class Verified:
    """The result for one variant, which is intact if there are no problems."""

    variant: str
    path: Path
    files: int = 0
    version: int | None = None
    id: str | None = None
    problems: list[str] = field(default_factory=list)
    signature: str = "absent"
    is_variant: bool = False  # whether `kernels` would see a variant there, and not what lies beside them


def verify_build(build: Path) -> list[Verified]:
    """Verify every variant below the folder ``build`` of a kernel repository."""
    found = []
    for path in sorted(build.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            found.append(verify_variant(path))
        elif not path.is_dir():
            found.append(Verified(path.name, path, problems=[f"{path.name}: a file where variants are"]))
    return found


def verify_variant(path: Path) -> Verified:
    """Verify one variant, a folder that is named like it."""
    found = Verified(path.name, path, is_variant=(path / METADATA).exists())
    found.problems += _name_problems(path.name)
    try:
        found.files = sum(1 for _ in published_files(path))
        content = (path / METADATA).read_bytes()
    except FileNotFoundError:
        found.problems.append(f"{METADATA}: missing")
        return found
    except OSError as error:
        found.problems.append(f"{METADATA}: cannot be read: {error.strerror}")
        return found
    try:
        metadata = Metadata.from_bytes(content)
    except ValueError as error:
        found.problems.append(f"{METADATA}: {error}")
        return found
    found.version, found.id = metadata.version, metadata.id
    found.problems += _metadata_problems(content)
    found.problems += _digest_problems(path, metadata)
    if (path / SIGNATURE).is_file():
        found.signature = "not checked: see kernels verify-signature"
    return found


def _name_problems(name: str) -> list[str]:
    try:
        written = parse_variant(name).variant_str
    except ValueError as error:
        return [f"{name}: kernels does not know such a variant: {error}"]
    return [] if written == name else [f"{name}: kernels reads this variant as {written}"]


def _metadata_problems(content: bytes) -> list[str]:
    written = json.loads(content)
    if content != render(written) or written.get("id") != identity(written):
        return [
            f"{METADATA}: changed: its id is not the one that belongs to its content, "
            f"{identity(written)}; scripts/build.py writes both"
        ]
    return []


def _digest_problems(path: Path, metadata: Metadata) -> list[str]:
    problems = [
        # Python would run it in place of a source
        f"{stray.relative_to(path)}: bytecode without its source"
        for stray in path.rglob("*.pyc")
        if "__pycache__" not in stray.relative_to(path).parts
    ]
    if metadata.digest is None:
        return [*problems, f"{METADATA}: has no digest"]
    if metadata.digest.algorithm not in (DigestAlgorithm.SHA256, DigestAlgorithm.SHA512):
        return [*problems, f"{METADATA}: the digest's algorithm {metadata.digest.algorithm} is unknown"]
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, path))
    except DigestValidationError as error:
        problems += [_violation(violation) for violation in error.violations]
    except OSError as error:  # a link that leads nowhere
        problems.append(f"cannot be read: {error}")
    return problems


def _violation(violation: Any) -> str:
    match violation:
        case DigestViolation.MissingFile(path=path):
            return f"{path}: missing"
        case DigestViolation.UnknownFile(path=path):
            return f"{path}: not in the digest, an extra file"
        case DigestViolation.HashMismatch(path=path):
            return f"{path}: changed, its digest differs"
    return str(violation)
