"""Build machines that are not as they should be, of files: packages before the real ones, CANN, cards."""

import subprocess
from pathlib import Path

from kernels_ext_npu.doctor.installed_packages import read
from kernels_ext_npu.doctor.observations import STACK, Observations, Outcome
from softnpu import runtime

# what the loader says of the real wheel on a machine without CANN
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"

# torch's own files are those of a CPU build: this makes them say what those of a CUDA build say to torch_npu, which
# then refuses them by itself
CUDA = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_npu" and "torch" in sys.modules:
            import torch
            torch._C._get_accelerator = lambda *check: torch.device("cuda")
        if name == "torch.version":
            from importlib.util import spec_from_file_location
            return spec_from_file_location(name, {version!r})

sys.meta_path.insert(0, Finder())
"""


def module(site: Path, name: str, source: str, version: str | None = None, metadata: str = "") -> Path:
    """Write a package into a folder, as pip would have installed it; without metadata where no version is given."""
    (site / name).mkdir(parents=True, exist_ok=True)
    (site / name / "__init__.py").write_text(source)
    if version is not None:
        dist_info(site, name, version, metadata)
    return site


def dist_info(site: Path, name: str, version: str, metadata: str = "") -> Path:
    """Write the metadata of a package alone."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    written = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(written)
    return site


def cuda_torch(site: Path) -> Path:
    """Write torch as a CUDA build, in its metadata and for torch_npu."""
    dist_info(site, "torch", "2.13.0+cu130")
    version = site / "cuda_version.py"
    version.write_text("__version__, cuda = '2.13.0+cu130', '13.0'\ndebug = hip = rocm = xpu = git_version = None\n")
    (site / "sitecustomize.py").write_text(CUDA.format(version=str(version)))
    return site


def cann(home: Path, version: str | None) -> Path:
    """Write CANN as its installer leaves it: <home>/<arch>-linux/ascend_toolkit_install.info, and set_env.sh beside."""
    (home / "x86_64-linux").mkdir(parents=True)
    if version is not None:
        info = f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001\narch=x86_64\n"
        (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text(info)
    (home.parent / "set_env.sh").write_text("")
    return home


def played_cann(folder: Path, version: str, devices: int) -> dict[str, str]:
    """Return an environment in which torch_npu starts by itself, with the software device's libraries as CANN's.

    Args:
        devices: the number that the runtime tells.
    """
    libraries = runtime.cache() / runtime._fingerprint()  # beside it may be those of other processors
    home = cann(folder / version, version)
    for name in ("opp", "runtime", "compiler"):
        (home / name).mkdir()
    source = f"int aclrtGetDeviceCount(unsigned *n) {{ *n = {devices}; return 0; }}"
    preloaded = folder / "devices.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(preloaded)], input=source, text=True, check=True)
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(preloaded),
    }


def card(root: Path, nodes: int = 0) -> Path:
    """Write a machine's files with a card on the PCI bus, its driver, and device nodes."""
    slot = root / "sys/bus/pci/devices/0000:c1:00.0"
    slot.mkdir(parents=True)
    (slot / "vendor").write_text("0x19e5\n")
    (slot / "class").write_text("0x120000\n")
    network = root / "sys/bus/pci/devices/0000:05:00.0"  # of the same vendor
    network.mkdir()
    (network / "vendor").write_text("0x19e5\n")
    (network / "class").write_text("0x020000\n")
    (root / "dev").mkdir()
    for number in range(nodes):
        (root / "dev" / f"davinci{number}").write_text("")
    (root / "dev" / "davinci_manager").write_text("")
    (root / "usr/local/Ascend/driver").mkdir(parents=True)
    (root / "usr/local/Ascend/driver/version.info").write_text("Version=25.2.0\nascendhal_version=7.35.23\n")
    return root


def observed(**outcomes: Outcome) -> Observations:
    """Observe what is installed here, and otherwise what is given; what is not given saw nothing."""
    nothing = {"disk": Outcome(), "torch": Outcome(), "hub": Outcome()}
    return Observations("bundled", {name: read(name) for name in STACK}, **(nothing | outcomes))
