"""Errors that users of torch_npu, kernels and transformers meet: what they mean, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Known:
    """An error that is known: how it is recognised, what it means, and what to do.

    Attributes:
        pattern: the regular expression that finds it in the text of an exception.
        meaning: why it happens.
        advice: what to do; groups of the pattern may be named.
        commands: what to do, for a shell.
        see: the heading in docs/troubleshooting.md.
    """

    pattern: str
    meaning: str
    advice: str
    commands: tuple[str, ...] = ()
    see: str | None = None


SOURCE_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
SOURCE_SET_ENV_85 = "source /usr/local/Ascend/cann/set_env.sh  # since CANN 8.5"
SET_ENV = (SOURCE_SET_ENV, SOURCE_SET_ENV_85)
NO_CANN = re.compile(
    r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|graph|acl_tdt_channel)\.so[^:]*: cannot open shared object file"
)
# name of a module -> name of its package
PACKAGES = {"yaml": "pyyaml", "torch_npu": "--no-deps torch_npu", "PIL": "pillow", "attr": "attrs"}

KNOWN = [
    Known(
        NO_CANN.pattern,
        "CANN's libraries are not where the loader looks for them",
        "Install CANN if it is not, and source its script in the shell that starts Python.",
        SET_ENV,
        "libhccl.so: cannot open shared object file",
    ),
    Known(
        "Two accelerators cannot be used at the same time",
        "torch is a build for another accelerator, and torch_npu takes CPU builds only",
        "Install the CPU build of the same release of torch.",
        see="Two accelerators cannot be used at the same time",
    ),
    Known(
        "undefined symbol|symbol lookup error",
        "torch_npu was built against another release of torch or CANN",
        "Install the releases of torch, torch_npu and CANN that belong together.",
        see="undefined symbol",
    ),
    Known(
        r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",
        "the system's C or C++ library is older than the one that the wheel was built for",
        "Use a newer system or container image, or a wheel that was built for this one.",
        see="version `…' not found",
    ),
    Known(
        r"ASCEND_(HOME|OPP|RUNTIME|COMPILER)_PATH",
        "the environment names a folder of CANN that is not complete",
        "Unset the variables that begin with ASCEND_, and source the script of CANN again.",
        SET_ENV,
        "ASCEND_OPP_PATH environment variable is not set",
    ),
    Known(
        "The path does not exist:",
        "torch_npu looks for CANN's version below ASCEND_HOME_PATH, and that folder does not exist",
        "Source the script of CANN, which sets it.",
        SET_ENV,
        "ASCEND_OPP_PATH environment variable is not set",
    ),
    Known(
        "no C compiler",
        "the software device is a small C library that is built when it is first used",
        "Install a C compiler, or name one with CC.",
        ("apt-get install gcc  # openEuler: dnf install gcc",),
        "found no C compiler",
    ),
    Known(
        "softnpu keeps its libraries in",
        "the software device is built once, into a folder that this user cannot write to",
        "Set XDG_CACHE_HOME to a folder that you may write to.",
        ('export XDG_CACHE_HOME="$HOME/cache"',),
        "softnpu keeps its libraries in … and cannot write there",
    ),
    Known(
        "softnpu could not build",
        "the C compiler did not build the library of the software device",
        "Try another compiler with CC.",
        ("export CC=gcc",),
        "found no C compiler",
    ),
    Known(
        "Invalid LOCAL_KERNELS entry",
        "kernels reads LOCAL_KERNELS whatever it is to load, and cannot read this one",
        "Unset it, or write pairs such as organisation/name=/path, with colons between them.",
        ("unset LOCAL_KERNELS",),
        "Invalid LOCAL_KERNELS entry",
    ),
    Known(
        "Illegal header value",
        "kernels 0.17.2 sends an empty user agent where telemetry is off, and no request of it is sent",
        "Unset HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY and DO_NOT_TRACK before Python starts, or stay offline.",
        ("unset HF_HUB_DISABLE_TELEMETRY DISABLE_TELEMETRY DO_NOT_TRACK",),
        "Illegal header value",
    ),
    Known(
        "InvalidVersion",
        "kernels could not read CANN's version",
        "See CANN above: its version has to be known, with one digit before the dot.",
        see="InvalidVersion: Invalid version",
    ),
    Known(
        "Cannot find a build variant for this system",
        "no variant of the kernel fits this machine as kernels sees it",
        "See the variants above.",
        see="Cannot find a build variant for this system",
    ),
    Known(
        "in offline mode|Cannot find a local snapshot",
        "nothing is to be downloaded, and the Hub's cache does not hold the kernels as kernels wants them",
        "Install a bundle, or take the kernels of the package: register() without source.",
        ("kernels-ext-npu bundle --install kernels.zip",),
        "is not available in the local cache and Hugging Face Hub is in offline mode",
    ),
    Known(
        "is not a valid attention implementation registered in the",
        "a model names an attention that nobody registered, and on an NPU transformers loads none from the Hub",
        'Call register() before the model is loaded, or name another: model.set_attn_implementation("sdpa").',
        see="is not a valid attention implementation registered in the",
    ),
    Known(
        "Only c10::MemoryFormat::Contiguous is supported for creating a npu tensor",
        "torch_npu has no GELU of tensors that lie as channels-last, as image models leave them when they permute",
        "Make contiguous what its modules are given, by a hook that calls contiguous().",
        see="Only c10::MemoryFormat::Contiguous is supported for creating a npu tensor",
    ),
    Known(
        r"(?P<operator>aclnn\w+) or (?P=operator)GetWorkspaceSize not in",  # op-plugin, op_plugin/utils/op_api_common.h
        "the operators of CANN are older than torch_npu, or those for this card are not installed",
        "Install the package of operators (kernels) of the CANN that belongs to this torch_npu.",
    ),
    Known(
        r"EE8888|EE9999|E\d{5}: |507899|507008|507033|drvErr|aclInit|SetDevice|rtGetDevice",
        "the runtime of CANN or the driver could not start the device",
        "Look at what npu-smi says of it, and whether another process holds it.",
        ("npu-smi info",),
        "none visible to torch_npu",
    ),
    Known(
        "out of memory|OutOfMemory",
        "the device has no memory left, even for a tiny model",
        "Look for the processes that hold it.",
        ("npu-smi info",),
    ),
    Known("No space left on device", "a disk is full", "Make room where the caches are.", ("df -h",)),
]


def explain(errors: tuple[str, ...] | list[str]) -> Known | None:
    """Find what is known of an error, given with those that caused it; None if nothing is."""
    for error in reversed(errors):  # the cause says more than what was made of it
        if match := re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", error):
            module = match[1].partition(".")[0]
            package = PACKAGES.get(module, module)
            return Known(
                "", f"the package of the module {match[1]} is missing", "Install it.", (f"pip install {package}",)
            )
        for known in KNOWN:
            if re.search(known.pattern, error):
                return known
    return None
