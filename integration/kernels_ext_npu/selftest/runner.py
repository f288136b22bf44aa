"""Runs a selftest: in processes of its own, of which each goes on behind what ended the one before."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.machine.processes import Child

START = 180.0  # seconds for imports and the first call of a device, on slow disks
LIMIT = 60.0  # seconds for a piece: those of operators take milliseconds, those of models some seconds
MOST_ENDS = 25  # how many processes may die before the rest is given up

Tell = Callable[[int, int, str], None]


@dataclass
class Outcome:
    """What a selftest found."""

    quick: bool  # whether only a part was asked for
    machine: dict[str, Any] = field(default_factory=dict)  # what it ran on
    # what was found of each piece, by id; every one has ``agrees``
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)  # all that was to do

    @property
    def agrees(self) -> bool:
        """Whether everything was done, and gave what it has to."""
        return bool(self.ids) and all(self.rows.get(identity, {}).get("agrees", False) for identity in self.ids)

    @property
    def results(self) -> list[dict[str, Any]]:
        """What was found of each piece, in order, with what it is ``of``, ``what`` it calls, and in which ``dtype``."""
        found = []
        for identity in self.ids:
            row = dict(zip(("of", "what", "dtype"), identity.split(" | ")))
            found.append(row | self.rows.get(identity, {"agrees": False}))
        return found

    def fail(self, identity: str, error: str, refused: bool = False) -> None:
        """Note that a piece could not be done; which agrees with the sources of a release that refuses it."""
        self.rows[identity] = {"agrees": True, "refused": error} if refused else {"agrees": False, "error": error}


def run(
    source: str = "bundled",
    quick: bool = False,
    only: Sequence[str] = (),
    limit: float = LIMIT,
    tell: Tell = lambda *_: None,
) -> Outcome:
    """Test every kernel, and return what was found.

    Args:
        source: where the kernels come from, as register() takes it.
        quick: whether only a part is wanted.
        only: parts of the ids that are wanted; all of them without any.
        limit: seconds after which a piece counts as hanging, and its process is ended.
        tell: called with how much is done, of how much, and what begins.

    Raises:
        RefusedError: no process came as far as the first piece.
    """
    outcome = Outcome(quick)
    for _ in range(MOST_ENDS):
        arguments = {"source": source, "quick": quick, "only": list(only), "done": list(outcome.rows)}
        with Child("kernels_ext_npu.selftest.worker:work", arguments) as child:
            if _follow(child, outcome, limit, tell):
                break
    if not outcome.ids:
        raise RefusedError(f"there is no test whose name has {' or '.join(only)} in it")
    for identity in outcome.ids:
        if identity not in outcome.rows:
            outcome.fail(identity, "not run: too many processes ended before it")
    return outcome


def _follow(child: Child, outcome: Outcome, limit: float, tell: Tell) -> bool:
    """Note what a process says to its end, and tell whether all is done."""
    running: str | None = None
    refused = False  # whether sources say that what runs is not taken
    while True:
        try:
            said = child.hear(limit if running else START)
        except queue.Empty:
            if running is None:
                raise RefusedError(f"Python, torch and the device did not start within {START:.0f} s") from None
            outcome.fail(running, f"did not end within {limit:.0f} s", refused)
            return False
        if said is None:
            how = child.death()
            if running is not None:
                outcome.fail(running, f"its process {how}", refused)
            elif not outcome.ids:
                raise RefusedError(f"the process {how} before the first test: {child.printed().rpartition(chr(10))[2]}")
            return False
        if "failed" in said or "errors" in said:
            raise RefusedError(said.get("failed") or said["errors"][0])
        outcome.machine = said.get("machine", outcome.machine)
        outcome.ids = said.get("ids", outcome.ids)
        if "begins" in said:
            running, refused = said["begins"], said["refused"]
            tell(len(outcome.rows), len(outcome.ids), said["begins"])
        elif "ends" in said:
            identity, running = said.pop("ends"), None
            if said.keys() == {"error"}:
                outcome.fail(identity, said["error"], refused)
            else:
                outcome.rows[identity] = {"agrees": False} | said
        elif "done" in said:
            return said["done"]
