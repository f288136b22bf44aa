"""The order of the examination: probes first, as many at once as do not need one another, then conclusions."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kernels_ext_npu import __version__
from kernels_ext_npu.doctor import adapter, cann, copies, devices, libraries, network, packages, stack, usage, use_probe
from kernels_ext_npu.doctor.findings import Diagnosis, Finding, warning
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, STACK, Observations
from kernels_ext_npu.doctor.probing import Outcome, run, stopped_at_an_interrupt

# Seconds after which a probe is ended. torch and torch_npu take a minute on slow disks; a card starts in some seconds.
# The probes of the first line run side by side, then those of the second.
LIMITS = {"disk": 30.0, "torch": 60.0, "hub": 15.0} | {
    "autoload": 60.0,
    "use": 120.0,
    "transformers": 30.0,
    "repositories": 30.0,
}
HUB_TIMEOUT = 5.0  # of one request

Check = Callable[[Observations], "Finding | list[Finding]"]
CHECKS: dict[str, Check] = {
    "Python": stack.python,
    "torch": stack.torch,
    "torch_npu": adapter.torch_npu,
    "CANN": cann.cann,
    "device": devices.device,
    "autoload": stack.autoload,
    "transformers": libraries.transformers,
    "kernels": libraries.kernels,
    "accelerate and huggingface-hub": libraries.helpers,
    "requirements": libraries.requirements,
    "kernel files": copies.intact,
    "variant": copies.variants,
    "Hub cache": copies.cache,
    "Hub": network.reachable,
    "publisher": network.publisher,
    "register()": usage.usage,
}


def examine(source: str = "bundled") -> Diagnosis:
    """Run all probes on this machine, and conclude from them what is wrong and what to do.

    Args:
        source: where the kernels are to come from, as register() takes it.
    """
    seen = observe(source)
    findings = [finding for name, check in CHECKS.items() for finding in _conclude(name, check, seen)]
    return Diagnosis(__version__, source, findings)


def observe(source: str) -> Observations:
    """Run the probes, and collect what they saw."""
    with stopped_at_an_interrupt(), ThreadPoolExecutor(4) as pool:
        disk = pool.submit(run, "disk_probe", LIMITS["disk"])
        torch = pool.submit(run, "torch_probe", LIMITS["torch"], _without_softnpu())
        hub = pool.submit(_ask_hub)
        installed = {name: packages.read(name) for name in STACK}
        seen = Observations(source, installed, disk.result(), torch.result(), hub.result())
        later = []
        autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
        if autoload and seen.torch_works and seen.torch.failure and not seen.torch.hung:
            later.append(("autoload", pool.submit(run, "autoload_probe", LIMITS["autoload"], _without_softnpu())))
        dead = source == "hub" and seen.hub.failure is not None
        if _is_usable(seen):
            later.append(("use", pool.submit(run, "use_probe", LIMITS["use"], source=None if dead else source)))
        later.append(("repositories", pool.submit(_look_at_repositories, seen)))
        for name, future in later:
            setattr(seen, name, future.result())
    if seen.use is None or not seen.use.passed(use_probe.TRANSFORMERS):
        seen.imports = run("transformers_probe", LIMITS["transformers"])
    return seen


def _is_usable(seen: Observations) -> bool:
    """Tell whether there is a device to try, the card's or the software one."""
    return seen.packages["torch_npu"].installed and (seen.devices > 0 or seen.software_is_possible)


def _ask_hub() -> Outcome:
    if network.unusable_urls(dict(os.environ)):  # the client would tell the value, with the password in it
        return Outcome(failure="not asked")
    return run("hub_probe", LIMITS["hub"], timeout=HUB_TIMEOUT)


def _look_at_repositories(seen: Observations) -> Outcome:
    torch = seen.torch.facts.get("torch") or str(seen.packages["torch"].version or "2.13")
    cann_version = cann.as_kernels_reads(seen.cann) if seen.cann else None
    if seen.cann is None and seen.software_is_possible and seen.packages["torch_npu"].installed:
        cann_version = cann.as_kernels_reads(SOFTWARE_CANN)
    return run(
        "repositories_probe",
        LIMITS["repositories"],
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


def _conclude(name: str, check: Check, seen: Observations) -> list[Finding]:
    try:
        found = check(seen)
    except Exception as error:  # an observation that nobody thought of must not hide the others
        return [
            warning(
                name,
                f"doctor does not understand what it saw: {type(error).__name__}: {error}",
                advice="Please report this line, with the report that --json prints.",
            )
        ]
    return found if isinstance(found, list) else [found]
