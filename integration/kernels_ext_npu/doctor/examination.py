"""The order of the examination: probes first, as many at once as do not need one another, then conclusions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from kernels_ext_npu import __file__ as package_file
from kernels_ext_npu import __version__
from kernels_ext_npu.doctor import installed_packages, probes
from kernels_ext_npu.doctor.checks import device, hub_access, kernel_files, libraries, python_and_torch, register_effect
from kernels_ext_npu.doctor.findings import Finding, Verdict, remedy, warning
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, STACK, Observations, Outcome, run
from kernels_ext_npu.machine.processes import ended_at_an_interrupt

# Seconds after which a probe is ended. torch and torch_npu take a minute on slow disks; a card starts in some seconds.
# The probes of the first line run side by side, then those of the second.
DISK, TORCH, HUB = 30.0, 60.0, 15.0
AUTOLOAD, USE, REPOSITORIES = 60.0, 120.0, 30.0
TRANSFORMERS = 30.0
HUB_TIMEOUT = 5.0  # seconds for one request


CHECKS: dict[str, Callable[[Observations], Finding | list[Finding]]] = {
    "Python": python_and_torch.python,
    "torch": python_and_torch.torch,
    "torch_npu": python_and_torch.torch_npu,
    "CANN": device.cann,
    "device": device.device,
    "autoload": python_and_torch.autoload,
    "transformers": libraries.transformers,
    "kernels": libraries.kernels,
    "accelerate and huggingface-hub": libraries.helpers,
    "bitsandbytes": libraries.bitsandbytes,
    "requirements": libraries.requirements,
    "kernel files": kernel_files.intact,
    "variant": kernel_files.variants,
    "Hub cache": kernel_files.cache,
    "Hub": hub_access.reachable,
    "publisher": hub_access.publisher,
    "register()": register_effect.register_takes_effect,
}
_TINY_MODEL_FACTS = ("software", "device", "summary", "kept", "difference", "taken")
FACTS: dict[str, Callable[[Observations], dict[str, Any]]] = {  # that each finding of a check has, besides its own
    "Python": lambda seen: {"executable": sys.executable, "kernels_ext_npu": __version__, "folder": package_file},
    "torch": lambda seen: {"version": _version(seen, "torch"), "build": seen.torch_build},
    "torch_npu": lambda seen: {"version": _version(seen, "torch_npu"), "errors": seen.torch.errors},
    "CANN": lambda seen: {
        "version": seen.cann,
        "kernels_reads": seen.cann and device.as_kernels_reads(seen.cann),
        "ASCEND_HOME_PATH": seen.named_cann and seen.named_cann["path"],
        "places": seen.cann_places,
    },
    "device": lambda seen: {
        "count": seen.devices,
        "names": seen.torch.facts.get("names", []),
        "software": seen.software,
        "signs": seen.signs_of_hardware,
        device.VISIBLE: seen.environment.get(device.VISIBLE),
        "npu_smi": seen.disk.facts.get("npu_smi"),
    },
    "autoload": lambda seen: {python_and_torch.AUTOLOAD: seen.environment.get(python_and_torch.AUTOLOAD, "1")},
    "Hub": hub_access.asked,
    "register()": lambda seen: {name: seen.use.facts.get(name) for name in _TINY_MODEL_FACTS} if seen.use else {},
}


def examine(source: str) -> dict[str, Any]:
    """Run all probes, and return what JSON has: whether this machine is healthy, and a dictionary for each check."""
    seen = observe(source)
    found = [finding for name in CHECKS for finding in _conclude(name, seen)]
    healthy = not any(finding.verdict is Verdict.PROBLEM for finding in found)
    checks = [{"check": each.check} | asdict(each) | {"verdict": each.verdict.value} for each in found]
    return {"version": __version__, "source": source, "healthy": healthy, "checks": checks}


def observe(source: str) -> Observations:
    """Run the probes, and collect what they saw."""
    with ended_at_an_interrupt(), ThreadPoolExecutor(4) as pool:
        on_disk = pool.submit(run, probes.hardware_and_cann, DISK)
        alone = pool.submit(run, probes.torch_npu_alone, TORCH, _without_softnpu())
        asked = pool.submit(_ask_hub)
        installed = {name: installed_packages.read(name) for name in STACK}
        seen = Observations(source, installed, on_disk.result(), alone.result(), asked.result())
        later = {"repositories": pool.submit(_look_at_repositories, seen)}
        if _is_usable(seen):
            dead = source == "hub" and seen.hub.failure is not None
            later["use"] = pool.submit(run, probes.swapped_and_compared, USE, source=None if dead else source)
        autoload = os.environ.get(python_and_torch.AUTOLOAD, "1") == "1"
        if autoload and seen.torch_works and seen.torch.failure and not seen.torch.hung:
            later["autoload"] = pool.submit(run, probes.imports, AUTOLOAD, _without_softnpu(), names=["torch"])
        for name, future in later.items():
            setattr(seen, name, future.result())
    if seen.use is None or not seen.use.passed(probes.TRANSFORMERS):
        quiet = os.environ | {python_and_torch.AUTOLOAD: "0"}  # torch_npu is told by itself
        seen.imports = run(probes.imports, TRANSFORMERS, quiet, names=["kernels", "transformers"])
    return seen


def _is_usable(seen: Observations) -> bool:
    """Tell whether there is a device to try, the card's or the software one."""
    return seen.packages["torch_npu"].installed and (seen.devices > 0 or seen.software_is_possible)


def _ask_hub() -> Outcome:
    if hub_access.unusable_urls(dict(os.environ)):  # the client would tell the value, with the password in it
        return Outcome(failure="not asked")
    return run(probes.versions_and_publisher, HUB, timeout=HUB_TIMEOUT)


def _look_at_repositories(seen: Observations) -> Outcome:
    torch = seen.torch.facts.get("torch") or str(seen.packages["torch"].version or "2.13")
    cann_version = device.as_kernels_reads(seen.cann) if seen.cann else None
    if seen.cann is None and seen.software_is_possible and seen.packages["torch_npu"].installed:
        cann_version = device.as_kernels_reads(SOFTWARE_CANN)
    return run(
        probes.copies_and_cache,
        REPOSITORIES,
        source=seen.source,
        torch=torch,
        cann=cann_version,
        arch=platform.machine(),
    )


def _without_softnpu() -> dict[str, str]:
    """Return the environment of a program that does not import softnpu.

    It is that also where doctor itself runs with `python -m softnpu`.
    """
    environment = dict(os.environ)
    if os.path.basename(os.path.dirname(environment.get("ASCEND_HOME_PATH", ""))) == "softnpu":
        for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
            environment.pop(name, None)
    return environment


def _version(seen: Observations, name: str) -> str | None:
    version = seen.packages[name].version
    return str(version) if version else None


def _conclude(name: str, seen: Observations) -> list[Finding]:
    try:
        found, facts = CHECKS[name](seen), FACTS[name](seen) if name in FACTS else {}
        findings = found if isinstance(found, list) else [found]
    except Exception as error:  # an observation that nobody thought of must not hide the others
        said = f"doctor does not understand what it saw: {type(error).__name__}: {error}"
        return [warning(said, check=name, **remedy("not understood"))]
    return [replace(each, check=each.check or name, facts=facts | each.facts) for each in findings]
