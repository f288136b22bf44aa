"""Sigstore bundles beside ``metadata.json``: the digest in the signed metadata covers all other files of a variant.

`kernels verify-signature` accepts the workflows of one organisation alone; here the reader says whose he accepts.
"""

from __future__ import annotations

import re

from huggingface_hub import constants

WORKFLOW = re.compile(r"https://github\.com/([^/]+/[^/]+)/\.github/workflows/.+@.+")


def check(metadata: bytes, bundle: bytes, signers: list[str] | None = None) -> tuple[str, str | None]:
    """Check the bundle over the bytes of ``metadata.json``.

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
