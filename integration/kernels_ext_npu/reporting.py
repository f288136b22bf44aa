"""What was swapped in a model, and what was not, and why. Read from the model as it is, not from what was planned."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import MethodType

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from kernels_ext_npu import functions, registration
from kernels_ext_npu.marking import LAYERS, kernel_name, refusal
from kernels_ext_npu.matching import find_reference

# norms that are no RMS norms, so that no kernel could be missing for them
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        path: its name in the model.
        class_name: its class.
        kernel: the layer that serves it or would serve it, None if there is none.
        swapped: whether the kernel's forward is in place.
        reason: why not, None if it is.
        is_candidate: whether one would expect a kernel for it; not so for a LayerNorm.
        is_function: whether it is a function that the module calls, and not the module itself.
    """

    path: str
    class_name: str
    kernel: str | None
    swapped: bool
    reason: str | None
    is_candidate: bool = True
    is_function: bool = False


class Report:
    """The rows of a model; ``print(report)`` shows them as a table, by class, and equal layers on one line."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> str:
        """A list of objects with path, class, kernel, swapped and reason."""
        rows = []
        for row in self.rows:
            fields = asdict(row)
            fields["class"] = fields.pop("class_name")
            rows.append({key: fields[key] for key in ("path", "class", "kernel", "swapped", "reason")})
        return json.dumps(rows, indent=2)

    def __rich__(self) -> Table:
        table = Table(title=self._title(), title_justify="left", box=box.SIMPLE_HEAD)
        if any(row.is_function and row.swapped for row in self.rows):
            table.caption, table.caption_justify = functions.SHARED, "left"
        table.add_column("class", max_width=26, overflow="fold")
        table.add_column("modules", overflow="fold")
        groups: dict[tuple[str, str], Counter[str]] = {}
        for row in self.rows:
            served = f"→ {row.kernel}" if row.swapped else f"kept: {row.reason}"
            paths = groups.setdefault((row.class_name, served), Counter())
            paths[re.sub(r"\b\d+\b", "*", row.path)] += 1
        for (class_name, served), paths in groups.items():
            modules = "\n".join(f"{count} × {path}" for path, count in paths.items())
            table.add_row(Text(f"{class_name}\n{served}"), Text(modules), end_section=True)
        return table

    def _title(self) -> str:
        norms, calls = ([row for row in self.rows if row.is_function == kind] for kind in (False, True))
        title = f"{sum(row.swapped for row in norms)} of {len(norms)} norms swapped"
        if calls:
            title += f", {sum(row.swapped for row in calls)} of {len(calls)} calls of rotary functions"
        return title

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def report(model: nn.Module) -> Report:
    """Every norm and rotary function of a model: swapped, or kept and why."""
    norms = [_row(path, module) for path, module in model.named_modules() if _is_norm(module)]
    return Report([*norms, *functions.rows(model)])


def _is_norm(module: nn.Module) -> bool:
    if find_reference(type(module)) is not None or getattr(type(module), "kernel_layer_name", None) in LAYERS:
        return True
    return "norm" in type(module).__name__.lower() and not any(module.children())


def _row(path: str, module: nn.Module) -> Row:
    class_name = type(module).__name__
    candidate = not isinstance(module, OTHER_NORMS)
    for name in ("forward", "_old_forward"):  # the second is where accelerate keeps what it wraps
        bound = vars(module).get(name)
        function = bound.__func__ if isinstance(bound, MethodType) else None
        if function is not None and kernel_name(function) is not None:
            layer = function.__qualname__.partition(".")[0]
            if kernel_name(function) in _KERNEL_NAMES and layer in LAYERS:
                return Row(path, class_name, layer, True, None)
            reason = f"served by {layer} of the kernel {kernel_name(function)}, which is not ours"
            return Row(path, class_name, None, False, reason, candidate)
    reference = find_reference(type(module))
    return Row(path, class_name, reference.layer if reference else None, False, _reason(module), candidate)


def _reason(module: nn.Module) -> str:
    if isinstance(module, OTHER_NORMS) and find_reference(type(module)) is None:
        return "not an RMS norm"
    reason = refusal(module)
    if reason is not None:
        return reason
    if registration.current is None:
        return "kernels are not registered: call kernels_ext_npu.register() before the model is loaded"
    return "the model was loaded without use_kernels=True, or its kernels were taken out: call kernelize(model)"


_KERNEL_NAMES = {repository.lower() for repository in LAYERS.values()}
