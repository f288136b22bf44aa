"""Load and run kernels in a fresh process, on the software device where there is no NPU.

The process is ``python -m publishing.trial REQUEST ANSWER``, two files of JSON, so that nothing a kernel prints mixes
with what is said about it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernels_ext_npu.catalogue import CATALOGUE

if TYPE_CHECKING:
    from kernels_ext_npu.selftest.cases import Function

SECONDS = 600


def loadable(variant: Path) -> bool:
    """Tell whether a variant loads here: Python alone does anywhere, libraries where kernels' resolver takes them."""
    from kernels_ext_npu.distribution import variant_choice

    if not any(path.suffix == ".so" for path in variant.rglob("*")):
        return True
    return any(decision.rank for decision in variant_choice.decide([variant.name]))


def load_local(variants: dict[str, Path]) -> list[str]:
    """List what goes wrong when the variants are loaded and run from their folders."""
    answer = _run({"variants": {name: str(path) for name, path in variants.items()}}, {"PYTHONDONTWRITEBYTECODE": "1"})
    if "failure" in answer:
        return [f"{', '.join(variants)}: cannot be loaded: {answer['failure']}"]
    return answer["problems"]


def load_published(repo_id: str, endpoint: str, *, version: int | None = None, revision: str | None = None) -> dict:
    """Load a kernel from the Hub into an empty cache, and run it.

    Returns:
        ``variant`` is what `kernels` took, ``ran`` says whether one of its functions was checked, ``refusal`` what an
        untrusted publisher is told; ``failure`` is there where it went wrong, ``none`` where no
        variant fits this machine.
    """
    with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as cache:
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": cache, "KERNELS_CACHE": cache}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        return _run({"repo_id": repo_id, "version": version, "revision": revision}, environment)


def _run(request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    paths = [str(Path(__file__).parent.parent), *(path for path in sys.path if path)]
    inherited = {k: v for k, v in os.environ.items() if not (k.startswith("ASCEND_") and "softnpu" in sys.modules)}
    inherited.pop("LOCAL_KERNELS", None)
    with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request))
        try:
            process = subprocess.run(
                [sys.executable, "-m", "publishing.trial", str(asked), str(answered)],
                env=inherited | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {SECONDS} seconds"}
        if process.returncode or not answered.exists():
            return {"failure": _last_line(process.stderr) or f"the process ended with {process.returncode}"}
        return json.loads(answered.read_text())


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


# ---- in the fresh process --------------------------------------------------------------------------------------------
def main(request: dict[str, Any]) -> dict[str, Any]:
    from kernels import get_local_kernel

    import softnpu  # noqa: F401  before torch; changes nothing where there is an NPU

    if "repo_id" in request:
        return _published(**request)
    problems = []
    for name, path in request["variants"].items():
        try:
            kernel = get_local_kernel(Path(path))
            problems += [f"{name}: {problem}" for problem in _problems(kernel, Path(path))]
        except Exception as error:  # noqa: PERF203  whatever the code of a kernel raises
            problems.append(f"{name}: cannot be loaded: {type(error).__name__}: {error}")
    return {"problems": problems}


def _published(repo_id: str, version: int | None, revision: str | None) -> dict[str, Any]:
    from kernels import get_kernel

    from kernels_ext_npu.distribution.published import refusal

    try:
        kernel = get_kernel(repo_id, version=version, revision=revision, trust_remote_code=[repo_id])
    except FileNotFoundError as error:
        return {"none" if "Cannot find a build variant" in str(error) else "failure": str(error)}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    path = Path(str(kernel.__file__)).parent
    problems = _problems(kernel, path)
    answer: dict[str, Any] = {"variant": path.name, "ran": selftest_function(_name(path)) is not None}
    answer["refusal"] = refusal(repo_id, version or 0) if version is not None else None
    return answer | ({"failure": "; ".join(problems)} if problems else {})


def _problems(kernel: ModuleType, path: Path) -> list[str]:
    problems = [f"__all__ names {name}, which is not there" for name in _missing(kernel)]
    problems += _layer_problems(kernel)
    function = selftest_function(_name(path))
    if function is not None:
        try:
            if wrong := failure(function, kernel):
                problems.append(f"loads, but does not compute: {function.title}: {wrong}")
        except Exception as error:  # whatever the code of a kernel raises
            problems.append(f"loads, but does not compute: {type(error).__name__}: {' '.join(str(error).split())}")
    return problems


def failure(function: Function, kernel: ModuleType, device: str = "npu") -> str | None:
    """Say how far a function is from what it has to give in float32, if that is further than allowed; None if not."""
    import torch

    from kernels_ext_npu.selftest.comparing import TOLERANCE

    found, allowed = function.compare(kernel, torch.float32, device), TOLERANCE[torch.float32]
    if found.largest <= allowed:
        return None
    return f"forward {found.forward:.1e}, backward {found.backward:.1e}, where {allowed:.1e} is allowed"


def _name(path: Path) -> str:
    return json.loads((path / "metadata.json").read_text())["name"]


def _missing(kernel: ModuleType) -> list[str]:
    return [name for name in getattr(kernel, "__all__", []) if not hasattr(kernel, name)]


def _layer_problems(kernel: ModuleType) -> list[str]:
    """Validate a layer by kernels' own rules, against a class with the parameters that the layer's forward has."""
    from kernels.layer.layer import _validate_layer
    from torch import nn

    problems = []
    for name, layer in vars(getattr(kernel, "layers", kernel)).items():
        own = isinstance(layer, type) and issubclass(layer, nn.Module) and layer.__module__.startswith(kernel.__name__)
        if own and not name.startswith("_"):
            try:
                _validate_layer(check_cls=layer, cls=layer, repo=f"the layer {name}")
            except TypeError as error:
                problems.append(str(error))
    return problems


def selftest_function(name: str) -> Function | None:
    """Return what the selftest calls of a kernel of this clone; None for any other kernel."""
    repository = next((repository.name for repository in CATALOGUE if repository.kernel == name), None)
    if repository is None:
        return None
    from kernels_ext_npu.selftest.functions import FUNCTIONS

    return next(function for function in FUNCTIONS if function.repository == repository)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
