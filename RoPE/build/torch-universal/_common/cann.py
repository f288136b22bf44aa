"""Which release of CANN the machine has: operators of an older one take less."""

from __future__ import annotations

import re

import torch


def release(version: str | None) -> tuple[int, int]:
    """Return major and minor of a version such as ``8.2.RC1``; (0, 0), older than all, where there is none to read."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


# as torch_npu has read it when it was imported: torch_npu/utils/collect_env.py, _add_collect_env_methods
CANN = release(getattr(torch.version, "cann", None))
