"""The functions that find something out about a machine, each in a process of its own.

They name each step before they take it, and say what they find as soon as they know it: whatever happens then. So they
import what may fail, or is slow, in the step that needs it.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from kernels_ext_npu import catalogue
from kernels_ext_npu.distribution import kernels_internals, sources
from kernels_ext_npu.environment import RefusedError, first_line
from kernels_ext_npu.machine import description
from kernels_ext_npu.machine.processes import say

# steps
TORCH, TORCH_NPU, CANN, DEVICES = "import torch", "import torch_npu", "reading CANN's version", "counting devices"
KERNELS, TRANSFORMERS = "import kernels", "import transformers"
SOFTNPU, DEVICE = "import softnpu", "adding two numbers on the NPU"
COPIES, HEADERS = "verifying the kernels", "asking as kernels"

NPU_SMI_LIMIT = 10.0


# ---- hardware and CANN, without torch --------------------------------------------------------------------------------
def hardware_and_cann() -> None:
    """Say which signs of a card there are, where CANN is, and what the driver's tool answers."""
    say(step="looking for hardware")
    say(**description.signs(Path("/")))
    say(step="looking for CANN")
    say(found=description.installed_cann())
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(variable):
            say(**{variable: description.describe_cann(Path(os.environ[variable]))})
    say(step="npu-smi info")
    say(npu_smi=_npu_smi())


def _npu_smi() -> dict[str, Any] | None:
    """Ask the driver's own tool: None where there is none, otherwise whether it answers."""
    program = which("npu-smi", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin"]))
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, "info"], capture_output=True, text=True, errors="replace", timeout=NPU_SMI_LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"program": program, "answers": False, "said": f"no answer within {NPU_SMI_LIMIT:.0f} s"}
    except OSError as error:
        return {"program": program, "answers": False, "said": str(error)}
    said = (result.stderr.strip() or result.stdout.strip()).splitlines()
    ended = f"it ended with {result.returncode}"
    return {"program": program, "answers": result.returncode == 0, "said": ": ".join([ended, *said[-1:]])}


# ---- what can be imported --------------------------------------------------------------------------------------------
def torch_npu_alone() -> None:
    """Import torch and torch_npu without the software device, and ask for CANN and for devices."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    say(step=TORCH)
    import torch

    say(torch=torch.__version__, torch_file=torch.__file__)
    say(**{kind: getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")})
    say(step=TORCH_NPU)
    import torch_npu

    say(torch_npu=torch_npu.__version__)
    say(step=CANN)
    from torch_npu.utils.collect_env import get_cann_version

    say(cann=get_cann_version())
    say(step=DEVICES)
    count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    say(devices=count)
    say(names=[torch_npu.npu.get_device_name(index) for index in range(count)])


def imports(names: list[str]) -> None:
    """Import packages, a step each, as a program without softnpu does."""
    for name in names:
        say(step=f"import {name}")
        import_module(name)
        if name == "kernels":
            say(gone=kernels_internals.gone())


# ---- what a user does ------------------------------------------------------------------------------------------------
def swapped_and_compared(source: str | None) -> None:
    """Swap kernels of a source into a tiny model on the NPU, and compare it with the CPU; without one stop before."""
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    say(step=SOFTNPU)
    import softnpu  # before torch; changes nothing where there is a card

    say(software=softnpu.is_software())
    say(step=TORCH_NPU)
    import torch
    import torch_npu

    say(step=DEVICE)
    say(device=torch_npu.npu.get_device_name(0), total=(torch.ones(1, device="npu") + 1).item())
    say(step=KERNELS)
    import kernels

    say(gone=kernels_internals.gone())
    say(step=TRANSFORMERS)
    from transformers import Qwen3MoeForCausalLM

    import kernels_ext_npu
    from kernels_ext_npu import model_configs
    from kernels_ext_npu.measuring import distance

    if source is None:
        return
    say(step="running a tiny model without kernels")
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(model_configs.config(model_configs.DENSE_AND_EXPERTS)).eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        model.to("npu")
        say(step="register()")
        kernels_ext_npu.register(source=source)
        say(step="swapping kernels into it")
        model.set_use_kernels(True)
        report = kernels_ext_npu.report(model)
        kept = [f"{row.path} ({row.class_name}): {row.reason}" for row in report if not row.swapped]
        say(rows=len(report), kept=kept, summary=report.summary())
        say(step="running it with kernels")
        found = model(input_ids=tokens.to("npu")).logits
    difference = distance.distance(found, expected).largest
    say(difference=difference, agrees=distance.models_agree(difference))
    loaded = kernels.get_loaded_kernels()
    say(taken={kernel.metadata.name.python_name: str(Path(str(kernel.module.__file__)).parent) for kernel in loaded})
    say(step="unregister()")
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
    if find_spec("bitsandbytes") is not None:
        say(bitsandbytes=_bitsandbytes())


def _bitsandbytes() -> str | None:
    """Import bitsandbytes, and return why it has no operators for the NPU; None where it has."""
    from kernels_ext_npu.bitsandbytes_backend import registration

    try:
        import_module("bitsandbytes")
    except Exception as error:  # of its native library, or of another backend
        return f"it cannot be imported: {first_line(error)}"
    return None if registration.is_registered() else f"its entry points name no {registration.GROUP} of this package"


# ---- the kernels on disk and in the Hub's cache ----------------------------------------------------------------------
def copies_and_cache(source: str, torch: str, cann: str | None, arch: str) -> None:
    """Say which variants there are, which one is taken here, and whether their files are intact."""
    say(step=KERNELS)
    from kernels_ext_npu.distribution import variant_choice
    from kernels_ext_npu.distribution.verification import verify_build

    machine = variant_choice.describe(torch, cann, arch)
    if source != "hub":
        say(step=COPIES)
        root = sources.root(source)
        there = [root / name for name in catalogue.REPOSITORIES if (root / name / "build").is_dir()]
        found = {path.name: _verified(verify_build(path / "build"), f"{path.name}/build", machine) for path in there}
        say(root=str(root), copies=found)
    say(step="reading the Hub's cache")
    say(**_cache())
    for name in catalogue.REPOSITORIES:
        say(**{f"cached {name}": _cached(name, machine)})


def _verified(found: list[Any], where: str, machine: Any) -> dict[str, Any]:
    from kernels_ext_npu.distribution import variant_choice

    return {
        "problems": [f"{where}/{entry.variant}/{line}" for entry in found for line in entry.problems],
        "decisions": [asdict(decision) for decision in variant_choice.decide_among(found, machine)],
    }


def _cache() -> dict[str, Any]:
    from huggingface_hub import constants

    from kernels_ext_npu.distribution import published

    facts: dict[str, Any] = {"offline": constants.HF_HUB_OFFLINE, "hub_cache": constants.HF_HUB_CACHE}
    try:
        folder = published.cache_folder()
    except RefusedError as error:
        return facts | {"refused": str(error)}
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    trouble = None
    if not os.path.isdir(nearest):
        trouble = f"{nearest} is not a folder"
    elif folder == nearest and not os.access(folder, os.R_OK | os.X_OK):
        trouble = f"{folder} may not be read by this user"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        trouble = f"{nearest} may not be written by this user"
    return facts | {"cache": str(folder), "trouble": trouble}


def _cached(name: str, machine: Any) -> dict[str, Any]:
    """Look for a repository as `kernels` does without a network: it wants a note of the commit and all files of it."""
    from huggingface_hub import snapshot_download

    from kernels_ext_npu.distribution import published, targets

    repo_id = f"{sources.ORGANISATION}/{name}"
    try:
        folder = published.cache_folder()
        snapshots = folder / f"kernels--{sources.ORGANISATION}--{name}" / "snapshots"
        if not snapshots.is_dir() or not any(snapshots.iterdir()):
            return {"state": "absent"}
        try:
            found = snapshot_download(
                repo_id,
                repo_type=published.KERNEL,
                revision=published.cached_commit(repo_id, sources.VERSION),
                cache_dir=folder,
                ignore_patterns=kernels_internals.find("kernels.resolver._BYTECODE_IGNORE_PATTERNS"),
                local_files_only=True,
            )
        except Exception as error:  # whatever the Hub's client makes of what it finds
            return {"state": "incomplete", "reason": f"{type(error).__name__}: {first_line(error)}"}
        snapshot = Path(found).resolve()
        verified = _verified([each for found in targets.verify_at(snapshot).values() for each in found], name, machine)
        return {"state": "damaged" if verified["problems"] else "complete", "commit": snapshot.name} | verified
    except (OSError, ValueError, RefusedError) as error:
        return {"state": "unreadable", "reason": f"{type(error).__name__}: {error}"}


# ---- the Hub, asked what `kernels` asks it, without torch ------------------------------------------------------------
def versions_and_publisher(timeout: float) -> None:
    """Ask the Hub for the kernels and their publisher, with so many seconds for each request."""
    say(step="import huggingface_hub")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import get_session

    from kernels_ext_npu.distribution.published import KERNEL

    quiet = constants.HF_HUB_DISABLE_TELEMETRY
    say(offline=constants.HF_HUB_OFFLINE, endpoint=constants.ENDPOINT, quiet=quiet)
    if constants.HF_HUB_OFFLINE:
        return
    get_session().timeout = timeout
    api = HfApi()
    repo_ids = {name: f"{sources.ORGANISATION}/{name}" for name in catalogue.REPOSITORIES}
    say(step="asking the Hub for versions")
    say(versions={name: _head(api, repo_id) for name, repo_id in repo_ids.items()})
    say(step="asking whether the publisher is trusted")
    try:
        overview = api.get_organization_overview(sources.ORGANISATION)
        say(trusted=bool(getattr(overview, "trustedKernelPublisher", False)))
    except Exception as error:  # kernels takes every failure of this question for a no
        say(trusted=None, untold=f"{type(error).__name__}: {first_line(error)}")
    if quiet:  # kernels names itself with an empty user agent then, which no request survives
        say(step=HEADERS)
        with suppress(RepositoryNotFoundError):
            kernels_internals.find("kernels.hf_hub._get_hf_api", HfApi)().list_repo_refs(
                next(iter(repo_ids.values())), repo_type=KERNEL
            )


def _head(api: Any, repo_id: str) -> str | None:
    """Return the commit of the version, None where there is no such repository or version."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    from kernels_ext_npu.distribution import published

    try:
        return published.head(api, repo_id, sources.VERSION)
    except published.VersionNotFoundError:
        return None
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401 and get_token() is not None:
            raise  # without a token the Hub answers 401 where there is no repository, with one that it is refused
        return None
