"""Make a CPU build of torch out of its CUDA build, which is all that the index has for aarch64 from torch 2.11 on.

torch_npu refuses a CUDA build, which needs 2.5 GB of libraries of NVIDIA. The libraries of torch for CUDA are taken
out, the others left as they are. What these name of them, and of those of NVIDIA, is in one small library under all
their names. It computes nothing: a function of it that is called ends the process with its name.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from proving import ProvingError

TOOLS = "aarch64-linux-gnu-"
CUDA_LIBRARIES = ("libtorch_cuda*.so", "libc10_cuda.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
NVIDIA_PACKAGES = re.compile(r"(cu|cuda|cudnn|cuFile|cupti|nccl)[A-Z]\w*")
# what is called while torch is imported, or asks whether there is CUDA
ANSWERS = {
    # c10::cuda::device_count()
    "_ZN3c104cuda12device_countEv": "signed char {}(void) {{ return 0; }}",
    # c10d::get_gil_checker(), a reference to what libtorch_python sets
    "_ZN4c10d15get_gil_checkerEv": "void *{}(void) {{ return nothing; }}",
    # c10d::ProcessGroupNCCL::Options::Options(bool), the default of an argument, destroyed when Python ends
    "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": "void {}(void **self) {{ *self = methods + 2; }}",
}
# of a CUDA build: file, line, and what the CPU build has in its place
SAYS = (
    ("version.py", r"^(__version__ = '[^+']*)[^']*", r"\1+cpu"),
    ("version.py", r"^(cuda\b.*= ).*", r"\1None"),
    ("backends/cuda/__init__.py", r"return torch\._C\._has_cuda$", "return False"),
)
HEAD = """#include <stdio.h>
#include <stdlib.h>
static void none(void) {}
static void *nothing[64], *type[] = {nothing, "absent"}, *methods[] = {0, type, none, none, none, none};
"""


def leave_cuda_out(packages: Path) -> None:
    """Make the torch in a folder of packages a CPU build; one that has no CUDA stays as it is.

    Raises:
        ProvingError: the compiler for aarch64 and its tools are not there, or fail.
    """
    libraries = packages / "torch" / "lib"
    gone = [path for glob in CUDA_LIBRARIES for path in libraries.glob(glob)]
    if not gone:
        return
    theirs = {name: kind for path in gone for *_, kind, name in _lines("nm", "-D", "--defined-only", path)}
    for path in gone:
        path.unlink()
    staying = sorted(libraries.glob("*.so"))
    named = {line[-1].partition("@")[0] for path in staying for line in _lines("nm", "-D", "--undefined-only", path)}
    source, absent = libraries / "absent.c", libraries / "libabsent.so"
    definitions = filter(None, (_definition(name, theirs.get(name)) for name in sorted(named)))
    source.write_text(HEAD + "\n".join(definitions) + "\n")
    _run("gcc", "-shared", "-fPIC", "-o", absent, source)
    for name in {
        line[-1].strip("[]") for path in staying for line in _lines("readelf", "-d", path) if "(NEEDED)" in line
    }:
        if name in {path.name for path in gone} or re.match(r"lib(cuda|cudnn|cufile|cupti|nccl)", name):
            (libraries / name).hardlink_to(absent)
    _say_cpu(packages / "torch")


def _definition(name: str, kind: str | None) -> str:
    """Define a name in C by its kind, as nm writes it, in the libraries that are taken out.

    Nothing for a name of others, nor for one that each library has that uses it, which is of the kind W.
    """
    if name in ANSWERS:
        return ANSWERS[name].format(name)
    if kind == "T" or (kind is None and NVIDIA_PACKAGES.fullmatch(name)):
        return f'void {name}(void) {{ fputs("{name} of CUDA was called\\n", stderr); abort(); }}'
    if kind == "V" and name.startswith("_ZTI"):  # type information: pybind11 compares the names of types
        return f'void *{name}[] = {{nothing, "{name[4:]}"}};'
    return f"void *{name}[64];" if kind in ("B", "D", "R", "V") else ""


def _say_cpu(torch: Path) -> None:
    """Let torch say what the CPU build says, in its version and to whoever asks whether it was built for CUDA."""
    for file, line, instead in SAYS:
        text, changed = re.subn(line, instead, (torch / file).read_text(), flags=re.MULTILINE)
        if not changed:
            raise ProvingError(f"{torch / file} has no line like {line}, which a CPU build has otherwise")
        (torch / file).write_text(text)


def _lines(tool: str, *arguments: str | Path) -> list[list[str]]:
    return [line.split() for line in _run(tool, *arguments).splitlines() if line.strip()]


def _run(tool: str, *arguments: str | Path) -> str:
    command = [TOOLS + tool, *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise ProvingError(f"{command[0]} is not there: apt-get install gcc-aarch64-linux-gnu") from error
    except subprocess.CalledProcessError as error:
        raise ProvingError(f"{' '.join(command)} ended with {error.returncode}\n{error.stderr.strip()}") from error
