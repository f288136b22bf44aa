"""What has to be true of a machine before kernels can be swapped in, and what to do where it is not."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# The ranges that the tests ran with; transformers itself takes one minor release of kernels at a time.
TESTED = {"transformers": SpecifierSet(">=5.20.2,<5.25"), "kernels": SpecifierSet(">=0.17.2,<0.18")}


# the newest two of them that take each other where no kernels 0.18 is to be had
TAKEN_TOGETHER = "'transformers==5.22.2' 'kernels==0.17.2'"


_version = functools.cache(version)  # which reads a file, and does not keep that a package was missing


class RefusedError(Exception):
    """What was asked for cannot be done. The message says why, and what can."""

    code = 2  # what a command ends with


class UnsupportedEnvironmentError(RefusedError, RuntimeError):
    """Kernels cannot be swapped in on this machine. The message says what to do."""


def check() -> None:
    """Raise UnsupportedEnvironmentError where kernels cannot work, warn where nobody has tried whether they do."""
    for name, tested in TESTED.items():
        found = installed(name)
        if found is None:
            raise UnsupportedEnvironmentError(f"{name} is not installed: pip install '{name}{tested}'")
        if not tested.contains(found, prereleases=True):
            warnings.warn(f"kernels-ext-npu was tested with {name} {tested}, found {found}", stacklevel=3)
    if importlib.util.find_spec("torch_npu") is None:
        raise UnsupportedEnvironmentError(
            "torch_npu is not installed. On a machine with an Ascend device install the release that fits torch and "
            f"CANN, for torch {installed('torch')}: pip install --no-deps torch_npu. Without a device do the same, and "
            "`import softnpu` before torch."
        )
    _check_cann()
    _check_transformers_accepts_kernels()


def _check_transformers_accepts_kernels() -> None:
    from transformers.integrations import hub_kernels
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        lowest = getattr(import_utils, "KERNELS_MIN_VERSION", "?")
        beyond = getattr(import_utils, "KERNELS_MAX_VERSION", "?")
        raise UnsupportedEnvironmentError(
            f"transformers {installed('transformers')} takes kernels >= {lowest}, < {beyond} and ignores the installed "
            f"{installed('kernels')}: pip install 'kernels>={lowest},<{beyond}', or, where there is no such release, "
            f"pip install {TAKEN_TOGETHER}"
        )
    if not hasattr(hub_kernels, "get_kernel_mapping_transformers"):
        raise UnsupportedEnvironmentError(
            f"transformers {installed('transformers')} has another kernel mapping than the one kernels-ext-npu knows: "
            f"pip install 'transformers{TESTED['transformers']}'"
        )
    if not hub_kernels._kernels_enabled:
        raise UnsupportedEnvironmentError(
            "transformers has its kernels switched off by the environment variable USE_HUB_KERNELS: unset it, or set "
            "it to YES, before transformers is imported"
        )


def _check_cann() -> None:
    """Raise UnsupportedEnvironmentError where torch_npu cannot be imported, or kernels cannot read CANN's version.

    `kernels` takes the first and the third character of the version for major and minor.
    """
    try:
        from torch_npu.utils.collect_env import get_cann_version
    except Exception as error:  # the runtime libraries of CANN are missing, or torch is not a CPU build
        raise UnsupportedEnvironmentError(
            f"torch_npu cannot be imported: {first_line(error)}\nOn a machine with an Ascend device run "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` before Python; without one put `import softnpu` on "
            "the first line of the program."
        ) from error
    refusal = refuse_cann(get_cann_version())
    if refusal is not None:
        raise UnsupportedEnvironmentError(refusal)


def refuse_cann(found: str) -> str | None:
    """Return why `kernels` cannot work with a version of CANN, as torch_npu tells it; None if it can."""
    if re.match(r"\d\.\d", found):
        return None
    if re.match(r"\d\d", found):
        return (
            f"kernels {installed('kernels')} cannot read the version of CANN {found}: it expects one digit before the "
            "dot, and would end in InvalidVersion. Use CANN 8 or 9, or a release of kernels that can."
        )
    return (
        f"torch_npu reports CANN's version as {found!r}, and kernels cannot choose a variant without one: loading a "
        "kernel would end in InvalidVersion. The version is read from ascend_*_install.info below "
        "$ASCEND_HOME_PATH: run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` (from CANN 8.5 on "
        "/usr/local/Ascend/cann/set_env.sh) before Python."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or the name of its class."""
    return next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)


def choices(name: object, known: Iterable[str]) -> str:
    """Say which names are known, behind the one that may have been meant, in capital letters or not."""
    by_name = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), by_name, n=1)
    question = f"did you mean {by_name[near[0]]}? " if near else ""
    return f"{question}there are {', '.join(known)}"


def installed(name: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    try:
        return _version(name)
    except PackageNotFoundError:
        return None
