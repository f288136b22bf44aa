"""Run one proof: the tests of tests/variants, in a process of the releases that a strict variant names."""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from proving.interpreters import Interpreter
from proving.pairs import Proof

# far above what one takes: 20 seconds of imports under emulation, and half a minute of tests
SECONDS = 3600


@dataclass(frozen=True)
class Outcome:
    """Tell how a proof went.

    Attributes:
        checks: how many tests passed.
        failures: what failed, each with its message; for an unfinished run, the end of its output.
        seconds: of the whole process.
        largest: what was compared, such as "layers bfloat16" -> the largest difference.
        log: what the process printed.
    """

    proof: Proof
    checks: int
    failures: tuple[str, ...]
    seconds: float
    largest: dict[str, float]
    log: str


def prove(proof: Proof, interpreter: Interpreter, packages: list[Path], root: Path, *arguments: str) -> Outcome:
    """Run the tests; ``arguments`` are further ones of pytest."""
    with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            *interpreter.command, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=junit_family=xunit1",
            f"--junitxml={report}", *(arguments or ("tests/variants",)),
        ]  # fmt: skip
        start = time.monotonic()
        try:
            process = subprocess.run(
                command,
                cwd=root,
                env=_environment(proof, interpreter, packages),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
            log, status = process.stdout, process.returncode
        except subprocess.TimeoutExpired as error:
            log, status = (error.stdout or b"").decode(errors="replace"), -1  # bytes, whatever was asked for
        seconds = time.monotonic() - start
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    failures = tuple(
        _failure(case) for case in cases if case.find("failure") is not None or case.find("error") is not None
    )
    if not failures and (status or not cases):
        reason = {-1: f"not done after {SECONDS} seconds", 5: "no test was selected"}.get(
            status, f"pytest ended with {status}"
        )
        failures = (f"{reason}: {' '.join(log.split()[-40:])}",)
    passed = sum(len(case) == 0 or {child.tag for child in case} <= {"properties", "system-out"} for case in cases)
    return Outcome(proof, passed, failures, seconds, _largest(cases), log)


def _environment(proof: Proof, interpreter: Interpreter, packages: list[Path]) -> dict[str, str]:
    # what the software device or a real CANN set in this process is not what the proof starts with
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ASCEND_", "PYTHON"))}
    return inherited | interpreter.environment | {
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "PYTHONNOUSERSITE": "1",
        "SOFTNPU_CANN": proof.cann,
        "EXPECTED_VARIANT": proof.variant,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _failure(case: ET.Element) -> str:
    what = next(child for child in case if child.tag in ("failure", "error"))
    message = " ".join((what.get("message") or "").split())
    return f"{case.get('name')}: {message[:300]}"


def _largest(cases: list[ET.Element]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for each in (element for case in cases for element in case.iter("property")):
        name, value = each.get("name", ""), float(each.get("value", "nan"))
        largest[name] = max(largest.get(name, 0.0), math.inf if math.isnan(value) else value)
    return largest
