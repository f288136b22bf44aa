"""A probe of what a plain `import torch` does here."""

from __future__ import annotations

from kernels_ext_npu.doctor.probe import step


def probe() -> None:
    """Import torch, as a program without softnpu does first."""
    step("import torch")
    import torch  # noqa: F401
