"""Whether the variants of a kernel repository are what their ``metadata.json`` says.

`kernels` does not check it when it loads one. Everything that is wrong is listed, each with the file that it concerns.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, DigestViolation, Metadata
from kernels.variants import parse_variant

from kernels_ext_npu.distribution.variants import METADATA, identity, published_files, render

SIGNATURE = "metadata.json.sigstore"


@dataclass
class Verified:
    """What was found in one variant. It is intact where there are no problems."""

    variant: str
    path: Path
    files: int = 0
    version: int | None = None
    id: str | None = None
    problems: list[str] = field(default_factory=list)
    signature: str = "absent"
    is_variant: bool = False  # whether `kernels` would see a variant there, and not what lies beside them

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems


def verify_build(build: Path, *, signers: list[str] | None = None) -> list[Verified]:
    """Verify every variant below the folder ``build`` of a kernel repository, and that they fit one another.

    Args:
        signers: workflows whose signatures count, as `check_signature` takes them.
    """
    found = []
    for path in sorted(build.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            found.append(verify_variant(path, signers=signers))
        elif not path.is_dir():
            found.append(Verified(path.name, path, problems=[f"{path.name}: a file where variants are"]))
    by_id: dict[str | None, list[Verified]] = defaultdict(list)
    for verified in found:
        by_id[verified.id].append(verified)
    for same_id, sharers in by_id.items():
        if same_id is not None and len(sharers) > 1:
            names = ", ".join(verified.variant for verified in sharers)
            for verified in sharers:
                verified.problems.append(f"{METADATA}: the id {same_id} is that of {names}: they would share modules")
    return found


def verify_variant(path: Path, *, signers: list[str] | None = None) -> Verified:
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
    found.problems += _metadata_problems(content, path.name)
    found.problems += _digest_problems(path, metadata)
    if (path / SIGNATURE).is_file():
        found.signature, problem = check_signature(content, (path / SIGNATURE).read_bytes(), signers)
        if problem:
            found.problems.append(f"{SIGNATURE}: {problem}")
    return found


def _name_problems(name: str) -> list[str]:
    try:
        written = parse_variant(name).variant_str
    except ValueError as error:
        return [f"{name}: kernels does not know such a variant: {error}"]
    return [] if written == name else [f"{name}: kernels reads this variant as {written}"]


def _metadata_problems(content: bytes, variant: str) -> list[str]:
    written = json.loads(content)
    if content != render(written) or written.get("id") != identity(written, variant):
        return [
            f"{METADATA}: changed: its id is not the one that belongs to its content, "
            f"{identity(written, variant)}; scripts/build.py writes both"
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


def _violation(violation: DigestViolation) -> str:
    match violation:
        case DigestViolation.MissingFile(path=path):
            return f"{path}: missing"
        case DigestViolation.UnknownFile(path=path):
            return f"{path}: not in the digest, an extra file"
        case DigestViolation.HashMismatch(path=path):
            return f"{path}: changed, its digest differs"
    return str(violation)


WORKFLOW = re.compile(r"https://github\.com/([^/]+/[^/]+)/\.github/workflows/.+@.+")


def check_signature(metadata: bytes, bundle: bytes, signers: list[str] | None = None) -> tuple[str, str | None]:
    """Check the sigstore bundle over ``metadata.json``, whose digest covers all other files of a variant.

    `kernels verify-signature` accepts the workflows of one organisation alone; here the reader says whose he accepts.

    Args:
        signers: URIs of GitHub workflows, ``https://github.com/<org>/<repo>/.github/workflows/<file>@<ref>``. Without
            any, a signature is checked, but not whose it is.

    Returns:
        What there is to say of the signature, and what is wrong with it.

    Raises:
        ValueError: a signer is not the URI of a workflow.
    """
    from kernels.verify import GitHubWorkflowPolicy
    from sigstore.errors import Error, VerificationError
    from sigstore.models import Bundle, InvalidBundle
    from sigstore.verify import Verifier, policy

    policies = [GitHubWorkflowPolicy(repo_id=_repository(signer), signer_uris=[signer]) for signer in signers or []]
    try:
        parsed = Bundle.from_json(bundle)
    except InvalidBundle as error:
        return "unreadable", f"not a sigstore bundle: {error}"
    try:
        verifier = Verifier.production(offline=constants.HF_HUB_OFFLINE)
    except Error as error:
        return (
            "not checked",
            f"sigstore gives no keys, {error}; HF_HUB_OFFLINE=1 takes those it came with",
        )
    try:
        verifier.verify_artifact(metadata, parsed, policy.AnyOf(policies) if policies else policy.UnsafeNoOp())
    except VerificationError as error:
        return "invalid", f"the signature does not hold: {error}"
    return ("valid" if policies else "valid, by anyone (--signed-by says who may)"), None


def _repository(signer: str) -> str:
    match = WORKFLOW.fullmatch(signer)
    if match is None:
        raise ValueError(
            f"{signer!r} is not the URI of a workflow: "
            "https://github.com/<org>/<repo>/.github/workflows/<file>.yaml@refs/heads/main"
        )
    return match[1]
