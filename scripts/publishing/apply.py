"""Bring a branch of the Hub to what is wanted, with one commit that appears whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass

from kernels_ext_npu.distribution.published import KERNEL
from publishing import plan as planning
from publishing.plan import Plan, Wanted
from publishing.remote import FAILURES, ChangedError, RefusedError, Remote


@dataclass(frozen=True)
class Applied:
    """Name a branch, or a pull request for it, that holds what was wanted.

    Attributes:
        first: the plan that the run began with.
        last: the plan that led to `commit`, from what the branch held right before it.
    """

    first: Plan
    last: Plan
    commit: str
    pull_request: str | None = None

    @property
    def committed(self) -> bool:
        return self.commit != self.first.parent


def apply(remote: Remote, wanted: Wanted, message: str, create_pr: bool = False) -> Applied:
    """Plan and commit, until the branch is as wanted; where somebody commits in between, plan again.

    An answer that never came leaves open whether the commit was made. Then the next plan finds nothing left to do.

    Raises:
        RefusedError: a pull request has no branch to go to.
        RemoteError: the Hub changed or failed too often; the branch is as it was, or as wanted.
    """
    attempts: list[Plan] = []

    def step() -> Applied:
        plan = planning.make(remote, wanted)
        attempts.append(plan)
        if plan.parent is not None and plan.nothing_to_do:
            return Applied(attempts[0], plan, plan.parent)
        if create_pr:
            return _propose(remote, plan, message)
        if plan.parent is None:
            remote.api.create_repo(remote.repo_id, repo_type=KERNEL, exist_ok=True)
            plan = planning.make(remote, wanted)
            if plan.parent is None:
                raise ChangedError("the repository was not created")
        commit = _commit(remote, plan, message, plan.branch) if plan.exists else _open(remote, plan, message)
        return Applied(attempts[0], plan, commit)

    try:
        return remote.persist(f"{remote.repo_id}, branch {wanted.branch}", step)
    finally:
        if wanted.branch != "main" and not create_pr:
            _discard_draft(remote, wanted)


def _commit(remote: Remote, plan: Plan, message: str, branch: str) -> str:
    return remote.api.create_commit(
        remote.repo_id,
        plan.operations(),
        commit_message=message,
        repo_type=KERNEL,
        revision=branch,
        parent_commit=plan.parent,
    ).oid


def _open(remote: Remote, plan: Plan, message: str) -> str:
    """Begin a new branch with a commit that is complete.

    Made first and filled later, readers would find it empty, or with what it inherits from main. The branch that the
    commit is prepared on is named by its content, so that a run after one that was cut off goes on with it.
    """
    draft = _draft(plan.wanted)
    remote.api.create_branch(remote.repo_id, branch=draft, revision=plan.parent, repo_type=KERNEL, exist_ok=True)
    head = (remote.heads() or {}).get(draft)
    if head is None:  # for the client any 409 means that it is there
        raise ChangedError(f"the branch {draft} was not created")
    prepared = planning.compare(plan.wanted, head, False, remote.tree(head))
    if prepared.operations():
        head = _commit(remote, prepared, message, draft)
    remote.api.create_branch(remote.repo_id, branch=plan.branch, revision=head, repo_type=KERNEL)
    return head


def _draft(wanted: Wanted) -> str:
    content = hashlib.sha256(wanted.branch.encode())
    for path, data in sorted(wanted.files.items()):
        content.update(path.encode() + b"\0" + hashlib.sha256(data).digest())
    return f"draft-{wanted.branch}-{content.hexdigest()[:12]}"


def _discard_draft(remote: Remote, wanted: Wanted) -> None:
    """Delete the draft. Where the Hub does not answer, it stays until the next run with the same content."""
    with contextlib.suppress(*FAILURES):
        if _draft(wanted) in (remote.heads() or {}):
            remote.api.delete_branch(remote.repo_id, branch=_draft(wanted), repo_type=KERNEL)


def _propose(remote: Remote, plan: Plan, message: str) -> Applied:
    """Open a pull request, or return one of the same content if there is one."""
    if not plan.exists:
        raise RefusedError(
            f"{remote.repo_id} has no branch {plan.branch} that a pull request could go to: publish without --create-pr"
        )
    for number, head in list(remote.pull_requests().items())[:20]:
        if not plan.misfits(remote.tree(head)):
            return Applied(plan, plan, head, f"{remote.api.endpoint}/kernels/{remote.repo_id}/discussions/{number}")
    info = remote.api.create_commit(
        remote.repo_id,
        plan.operations(),
        commit_message=message,
        repo_type=KERNEL,
        revision=plan.branch,
        parent_commit=plan.parent,
        create_pr=True,
    )
    return Applied(plan, plan, info.oid, info.pr_url)
