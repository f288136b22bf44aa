"""What doctor looks at, before anything is concluded from it: the outcomes of probes, and what they mean together."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels_ext_npu.doctor import findings, installed_packages, probes
from kernels_ext_npu.doctor.findings import Finding, problem, warning
from kernels_ext_npu.doctor.installed_packages import Package
from kernels_ext_npu.machine.processes import Child

# what softnpu says as the version of CANN: importing it would import torch
_RUNTIME = (installed_packages.module_folder("softnpu") or Path()) / "runtime.py"
SOFTWARE_CANN = os.environ.get("SOFTNPU_CANN") or str(installed_packages.constants(_RUNTIME).get("CANN_VERSION"))
STACK = ("torch", "torch_npu", "transformers", "kernels", "huggingface-hub", "accelerate")
START = "starting Python"


@dataclass
class Outcome:
    """What a probe found out, and how it ended."""

    facts: dict[str, Any] = field(default_factory=dict)  # what it found out; ``passed`` are the steps that it completed
    step: str = START  # what it was doing at last
    failure: str | None = None  # how it failed in one line, None if it did not
    # the exception that ended it and those that caused it, outermost first, as "Type: message"
    errors: tuple[str, ...] = ()
    hung: bool = False  # whether it was stopped because its time was over
    output: str = ""  # the end of what it printed

    @property
    def cause(self) -> str | None:
        """The failure in a line: what caused it, without what was made of it."""
        return self.errors[-1].splitlines()[0] if self.errors else self.failure

    def problem(self, said: str, otherwise: str = findings.LOOK, commands: tuple[str, ...] = ()) -> Finding:
        """Make a finding of its failure: what is known of the errors, what to do otherwise, and what it printed."""
        facts = {"failure": self.failure, "errors": self.errors, "output": self.output}
        return problem(said, **findings.explained(self.errors, otherwise, commands), facts=facts)

    def passed(self, step: str) -> bool:
        """Tell whether a step was completed."""
        return self.failure is None or step in self.facts.get("passed", ())


def run(
    probe: Callable[..., None], limit: float, environment: dict[str, str] | None = None, **arguments: Any
) -> Outcome:
    """Run a function of `kernels_ext_npu.doctor.probes` with arguments, for at most `limit` seconds."""
    outcome, end = Outcome({"passed": []}), time.monotonic() + limit
    try:
        with Child(f"{probe.__module__}:{probe.__name__}", arguments, environment) as child:
            try:
                while (said := child.hear(end - time.monotonic())) is not None and "ended" not in said:
                    _note(outcome, said)
                if said is None and not outcome.errors:
                    outcome.failure = f"{outcome.step}: the process {child.death()}"
            except queue.Empty:
                outcome.hung, outcome.failure = True, f"{outcome.step}: no end after {limit:.0f} s"
                child.kill()
            outcome.output = child.printed()
    except OSError as error:  # no memory, no more processes
        outcome.failure = f"Python could not be started: {error}"
    return outcome


def _note(outcome: Outcome, said: dict[str, Any]) -> None:
    if "step" in said:
        if outcome.step != START:
            outcome.facts["passed"].append(outcome.step)
        outcome.step = said["step"]
    elif "errors" in said:
        outcome.errors = tuple(said["errors"])
        outcome.failure = f"{outcome.step}: {outcome.errors[0]}"
    else:
        outcome.facts |= said


@dataclass
class Observations:
    """The packages and the outcomes of the probes; None where a probe was not run."""

    source: str  # where the kernels are to come from, as register() takes it
    packages: dict[str, Package]  # the packages of `STACK`, by name
    disk: Outcome  # signs of hardware and of CANN
    torch: Outcome  # torch and torch_npu without the software device
    hub: Outcome  # what the Hub answered
    autoload: Outcome | None = None  # a plain `import torch`
    use: Outcome | None = None  # a model that was run with kernels
    imports: Outcome | None = None  # transformers and kernels, where `use` did not get as far
    repositories: Outcome | None = None  # the kernels on disk and in the cache
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def severe(self) -> Callable[..., Finding]:
        """What makes the finding of a fault of the Hub: it is a problem where the kernels are to come from there."""
        return problem if self.source == "hub" else warning

    # ---- torch -------------------------------------------------------------------------------------------------------
    @property
    def torch_build(self) -> str | None:
        """The kind of build that torch is, such as "CUDA 13.0"; None for a CPU build, or where it cannot be told."""
        facts = self.torch.facts
        if "xpu" not in facts and self.packages["torch"].folder is not None:  # it cannot be imported
            facts = installed_packages.constants(self.packages["torch"].folder / "version.py")
        for kind, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
            if facts.get(kind):
                return f"{name} {facts[kind]}"
        local = self.packages["torch"].version.local if self.packages["torch"].version else None
        return local if local and local.startswith(("cu", "rocm", "xpu")) else None

    @property
    def torch_works(self) -> bool:
        """Whether torch could be imported."""
        return self.torch.passed(probes.TORCH)

    @property
    def torch_npu_works(self) -> bool:
        """Whether torch_npu could be imported without the software device, which is with CANN."""
        return self.torch.passed(probes.TORCH_NPU)

    @property
    def only_cann_is_missing(self) -> bool:
        """Whether torch_npu would work, were CANN's libraries there: the software device has them."""
        found = [findings.explain([error]) for error in self.torch.errors]
        return any(known is not None and known.see == findings.NO_CANN for known in found)

    def missing(self, outcome: Outcome) -> str | None:
        """Return the package of the stack for want of which a probe failed.

        It is None if the probe did not fail, or for another reason.
        """
        for name, package in self.packages.items():
            module = f"No module named '{name.replace('-', '_')}"
            if not package.installed and any(module in error for error in outcome.errors):
                return name
        return None

    # ---- the device --------------------------------------------------------------------------------------------------
    @property
    def devices(self) -> int:
        """The number of devices that torch_npu sees without the software device."""
        return self.torch.facts.get("devices", 0)

    @property
    def nodes(self) -> list[str]:
        """The device files of cards."""
        return self.disk.facts.get("nodes", [])

    @property
    def driver_failure(self) -> str | None:
        """What the driver's tool said where it failed; None where it did not, or there is none."""
        npu_smi = self.disk.facts.get("npu_smi")
        return npu_smi["said"] if npu_smi and not npu_smi["answers"] else None

    @property
    def software_is_possible(self) -> bool:
        """Whether `import softnpu` gives a software device; on a machine with a card it changes nothing."""
        works = self.torch_works and self.torch_build is None and not self.torch.hung
        return works and not self.torch_npu_works and not self.nodes

    @property
    def runs_on_software(self) -> bool:
        """Whether torch_npu was imported by the software device."""
        return self.use is not None and self.software and self.use.passed(probes.TORCH_NPU)

    @property
    def software_failed_by_itself(self) -> bool:
        """Whether softnpu failed by itself, for want of a compiler, say.

        It did not where torch_npu cannot be imported with it either.
        """
        if self.use is None or self.use.step != probes.SOFTNPU or not self.use.errors:
            return False
        first = self.use.errors[0]
        return first.startswith("ImportError: softnpu ") and "softnpu runs the real torch_npu wheel" not in first

    @property
    def signs_of_hardware(self) -> list[str]:
        """The signs, in words, for which one would expect a card here."""
        facts, signs = self.disk.facts, []
        if self.nodes:
            signs.append(", ".join(self.nodes))
        if facts.get("cards"):
            signs.append(f"{len(facts['cards'])} on the PCI bus ({', '.join(facts['cards'])})")
        if facts.get("driver"):
            signs.append(f"the driver ({facts['driver']})")
        if facts.get("npu_smi"):
            signs.append(facts["npu_smi"]["program"])
        return signs

    @property
    def named_cann(self) -> dict[str, Any] | None:
        """The CANN that ASCEND_HOME_PATH names, None if it names none or the software device's."""
        named = self.disk.facts.get("ASCEND_HOME_PATH")
        return named if named and not named["software"] else None

    @property
    def cann_places(self) -> list[dict[str, Any]]:
        """The releases of CANN on disk: what the environment names first."""
        named = [self.disk.facts.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
        places = [place for place in named if place and place["version"] is not None]
        return [place for place in [*places, *self.disk.facts.get("found", [])] if not place["software"]]

    @property
    def expects_a_card(self) -> bool:
        """Whether a software device would not be what this machine is for."""
        return bool(self.signs_of_hardware or self.cann_places or self.named_cann or self.devices)

    @property
    def cann(self) -> str | None:
        """CANN's version, as torch_npu tells it or, where that cannot be imported, as it would."""
        if "cann" in self.torch.facts:
            return self.torch.facts["cann"]
        if self.named_cann:
            return self.named_cann["version"]
        return self.cann_places[0]["version"] if self.cann_places else None

    @property
    def software(self) -> bool:
        """Whether the software device was used, for want of another one."""
        return self.use is not None and bool(self.use.facts.get("software")) and not self.devices


def scripts(places: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the commands that set up CANN from where it is."""
    return tuple(dict.fromkeys(f"source {place['set_env']}" for place in places if place["set_env"]))
