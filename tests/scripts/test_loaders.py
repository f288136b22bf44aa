"""The kernel repositories with the releases of kernels that users have: each loads the variant that fits best."""

import json
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch.nn import functional as F

from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution.sources import ORGANISATION
from kernels_ext_npu.distribution.variants import names
from tests.localhub import LocalHub
from tests.support import environments

pytestmark = pytest.mark.long
ALL = [f"{ORGANISATION}/{name}" for name in REPOSITORIES]
# release -> one of huggingface_hub that fits it, the kind of repository that it loads, and the arguments of its
# `get_kernel` for version 1 of a kernel whose publisher is not a trusted one
RELEASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "0.11.7": ("1.33.0", "models", {"revision": "v1"}),
    "0.12.3": ("1.33.0", "models", {"version": 1}),
    "0.13.0": ("1.33.0", "models", {"version": 1}),
    "0.14.1": ("2.4.0", "kernels", {"version": 1, "trust_remote_code": True}),
    "0.15.2": ("2.4.0", "kernels", {"version": 1, "trust_remote_code": True}),
    "0.16.2": ("2.4.0", "kernels", {"version": 1, "trust_remote_code": True}),
    "0.17.2": ("2.4.0", "kernels", {"version": 1, "trust_remote_code": ALL}),
}

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
device, calls, arguments = json.loads(sys.argv[1])
for repo_id, call in calls.items():
    kernel = kernels.get_kernel(repo_id, **arguments)
    x = torch.linspace(-2, 3, 24).reshape(3, 8).to(device)
    y = eval("kernel." + call)
    print(json.dumps([pathlib.Path(kernel.__file__).parent.name, y.device.type, y.tolist()]))
print([importlib.metadata.version(name) for name in ("kernels", "huggingface_hub")], kernels.__file__)
"""


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_takes_the_variant_that_fits(
    release: str, machine: str, localhub: LocalHub, run_python, tmp_path_factory, worker_id: str, tmp_path: Path
) -> None:
    hub, kind, arguments = RELEASES[release]
    packages = f"kernels=={release}", f"huggingface_hub=={hub}"
    python = environments.interpreter(tmp_path_factory, worker_id, f"kernels-{release}", *packages)
    for name in EXAMPLES:
        files = build.render(build.ROOT / name, names(build.ROOT))
        localhub.publish(f"{ORGANISATION}/{name}", {f"build/{p}": text for p, text in files.items()}, "v1", kind)
    prelude, variant = MACHINES[machine]
    device = "cpu" if machine == "cpu" else "npu"
    environment = localhub.environment(tmp_path) | ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if device == "cpu" else {})
    asked = json.dumps([device, {f"{ORGANISATION}/{name}": call for name, (call, _) in EXAMPLES.items()}, arguments])
    *outcomes, versions = run_python(prelude + LOAD, asked, python=python, **environment).stdout.splitlines()
    assert versions.startswith(f"{[release, hub]} {Path(python).parent.parent}/")
    for (_, expected), outcome in zip(EXAMPLES.values(), map(json.loads, outcomes), strict=True):
        assert outcome[:2] == [variant, device]
        # float32 on both sides, and at most eight terms in a sum
        torch.testing.assert_close(torch.tensor(outcome[2]), expected)
