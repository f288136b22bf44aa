"""The kernel repositories with the releases of kernels that users have: what each loads, and what it cannot do."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from huggingface_hub import HfApi
from rich.console import Console
from torch.nn import functional as F

from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution.sources import ORGANISATION
from publishing.run import Request, publish
from tests.localhub import LocalHub
from tests.localhub.client import Client
from tests.support import environments

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Release:
    """A release of kernels, with a release of huggingface_hub that fits it.

    - kind: of the repositories that it loads
    - arguments: of its `get_kernel`, for version 1 of a kernel whose publisher is not a trusted one
    """

    kernels: str
    hub: str
    kind: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return self.kernels


ALL = [f"{ORGANISATION}/{name}" for name in REPOSITORIES]
RELEASES = [
    Release("0.11.7", "1.33.0", "model", {"revision": "v1"}),
    Release("0.12.3", "1.33.0", "model", {"version": 1}),
    Release("0.13.0", "1.33.0", "model", {"version": 1}),
    Release("0.14.1", "2.4.0", "kernel", {"version": 1, "trust_remote_code": True}),
    Release("0.15.2", "2.4.0", "kernel", {"version": 1, "trust_remote_code": True}),
    Release("0.16.2", "2.4.0", "kernel", {"version": 1, "trust_remote_code": True}),
    Release("0.17.2", "2.4.0", "kernel", {"version": 1, "trust_remote_code": ALL}),
]

# by the machine: what a fresh process does first, and the variant that fits best. The last one is a description: what
# the releases read of their machine says so
MACHINES = {
    "cpu": ("", "torch-universal"),
    "npu": ("import softnpu", "torch-npu"),
    "torch 2.8 and CANN 8.2 on aarch64": (
        """
import platform, softnpu, torch, torch_npu.utils.collect_env
platform.machine = lambda: "aarch64"
torch.__version__ = torch.torch_version.TorchVersion("2.8.0")
torch_npu.utils.collect_env.get_cann_version = lambda: "8.2.RC1"
""",
        "torch28-cxx11-cann82-aarch64-linux",
    ),
}

# a call in each repository, and what it has to give
X = torch.linspace(-2, 3, 24).reshape(3, 8)
EXAMPLES = {
    "FusedMoE": ("grouped_matmul(x, x.mT[None], torch.tensor([3], device=x.device))", X @ X.mT),
    "RMSNorm": ("rms_norm(x, None, 1e-6)", F.rms_norm(X, (8,), eps=1e-6)),
    "RoPE": ("rotary_mul(x, x, x)", X * X + torch.cat((-X[:, 4:], X[:, :4]), 1) * X),
    "SwiGLU": ("swiglu(x)", F.silu(X[:, :4]) * X[:, 4:]),
}
LOAD = """
import importlib.metadata, json, pathlib, sys, kernels, torch
device, call, attempts = json.loads(sys.argv[1])
outcomes = []
for repo_id, arguments in attempts:
    try:
        kernel = kernels.get_kernel(repo_id, **arguments)
    except Exception as error:
        outcomes.append({"error": [base.__name__ for base in type(error).__mro__], "message": str(error)})
        continue
    x = torch.linspace(-2, 3, 24).reshape(3, 8).to(device)
    y = eval("kernel." + call)
    outcomes.append({"variant": pathlib.Path(kernel.__file__).parent.name, "device": y.device.type, "y": y.tolist()})
versions = [importlib.metadata.version(name) for name in ("kernels", "huggingface_hub")]
print(json.dumps({"from": kernels.__file__, "versions": versions, "outcomes": outcomes}))
"""


# ---- environments ----------------------------------------------------------------------------------------------------
@pytest.fixture
def python(release: Release, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> str:
    """The interpreter of an environment with this release and its requirements, and with the torch of this one."""
    packages = f"kernels=={release.kernels}", f"huggingface_hub=={release.hub}"
    return environments.interpreter(tmp_path_factory, worker_id, f"kernels-{release}", *packages)


# ---- repositories ----------------------------------------------------------------------------------------------------
@pytest.fixture
def published(localhub: LocalHub, online: None) -> Callable[[str, str], str]:
    """Puts a repository of the project on the Hub as one of this kind: the build on v1, the card on main."""

    def put(name: str, kind: str) -> str:
        repo_id = f"{ORGANISATION}/{name}"
        if kind == "kernel":
            report = publish(Request(str(build.ROOT / name), load=False), Console(quiet=True), HfApi(localhub.url))
            assert report.status == "published"
            return repo_id
        folder = build.ROOT / name
        paths = [path for path in (folder / "build").rglob("*") if path.is_file() and path.suffix != ".pyc"]
        client = Client(localhub.url, repo_id, kind)
        client.create_repo()
        client.create_branch(branch="v1")
        client.commit({str(path.relative_to(folder)): path for path in paths}, "v1")
        client.commit({"README.md": folder / "README.md"})
        return repo_id

    return put


@pytest.fixture
def load(release: Release, python: str, localhub: LocalHub, run_python, tmp_path: Path) -> Callable[..., list[dict]]:
    """The outcomes of `get_kernel(repo_id, **arguments)`, one after the other in a fresh process with no cache."""

    def run(name: str, machine: str, *attempts: tuple[str, dict[str, Any]]) -> list[dict]:
        prelude, _ = MACHINES[machine]
        device = "cpu" if machine == "cpu" else "npu"
        environment = localhub.environment(tmp_path / "user")
        if machine == "cpu":
            environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        asked = json.dumps([device, EXAMPLES[name][0], attempts])
        answer = json.loads(run_python(prelude + LOAD, asked, python=python, **environment).stdout.splitlines()[-1])
        assert Path(answer["from"]).is_relative_to(Path(python).parent.parent)
        assert answer["versions"] == [release.kernels, release.hub]
        return answer["outcomes"]

    return run


# ---- what a release loads --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_a_release_takes_the_variant_that_fits(
    release: Release, machine: str, name: str, published, load, record_property
) -> None:
    (outcome,) = load(name, machine, (published(name, release.kind), release.arguments))
    assert "variant" in outcome, outcome
    record_property("variant", outcome["variant"])
    assert outcome["variant"] == MACHINES[machine][1]
    assert outcome["device"] == ("cpu" if machine == "cpu" else "npu")
    # float32 on both sides, and at most eight terms in a sum
    torch.testing.assert_close(torch.tensor(outcome["y"]), EXAMPLES[name][1])


# ---- what a release cannot do ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Refusal:
    """What some releases answer to some arguments, None for those with which they load."""

    releases: str
    arguments: dict[str, Any] | None
    error: str
    message: str
    name: str = "RMSNorm"


REFUSALS = {
    "models are looked for, not kernels": Refusal(
        "0.11.7 0.12.3 0.13.0", None, "RepositoryNotFoundError", "/api/models/kernels-ext-npu/SwiGLU/", "SwiGLU"
    ),
    "kernels are looked for, not models": Refusal(
        "0.14.1 0.15.2 0.16.2 0.17.2", None, "RepositoryNotFoundError", "/api/kernels/kernels-ext-npu/SwiGLU/", "SwiGLU"
    ),
    "a version is a specifier of tags": Refusal("0.11.7", {"version": 1}, "TypeError", "'int' object is not iterable"),
    "main holds the card alone": Refusal("0.11.7 0.12.3", {}, "FileNotFoundError", "(revision: main)"),
    "main has no build": Refusal("0.13.0", {}, "EntryNotFoundError", "build does not exist"),
    "main has no build, trusted": Refusal(
        "0.14.1", {"trust_remote_code": True}, "EntryNotFoundError", "build does not exist"
    ),
    "a version must be given": Refusal(
        "0.15.2 0.16.2 0.17.2", {"trust_remote_code": True}, "ValueError", "version or revision must be specified"
    ),
    "publishers are not checked": Refusal(
        "0.11.7 0.12.3 0.13.0", {"trust_remote_code": True}, "TypeError", "unexpected keyword argument"
    ),
    "publishers are checked": Refusal(
        "0.14.1 0.15.2 0.16.2 0.17.2", {"version": 1}, "ValueError", "is not from a trusted publisher"
    ),
    "a list does not trust what it names": Refusal(
        "0.14.1 0.15.2 0.16.2",
        {"version": 1, "trust_remote_code": ALL},
        "ValueError",
        "is not from a trusted publisher",
    ),
}


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_what_a_release_cannot_do_it_refuses(release: Release, published, load) -> None:
    published("RMSNorm", release.kind)
    published("SwiGLU", "model" if release.kind == "kernel" else "kernel")
    expected = {reason: refusal for reason, refusal in REFUSALS.items() if release.kernels in refusal.releases.split()}
    assert len(expected) >= 3
    attempts = [
        (f"{ORGANISATION}/{refusal.name}", release.arguments if refusal.arguments is None else refusal.arguments)
        for refusal in expected.values()
    ]
    for (reason, refusal), outcome in zip(expected.items(), load("RMSNorm", "cpu", *attempts)):
        assert refusal.error in outcome.get("error", []), f"{reason}: {outcome}"
        assert refusal.message in outcome["message"], reason
