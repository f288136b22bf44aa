"""The report: what is swapped in a model, what is not, and why, read from the model as it is now."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from kernels_ext_npu.binding import forward_binding, lazy_swap
from kernels_ext_npu.binding.devices import assume_npu_if_meta, check_is_module, is_elsewhere
from kernels_ext_npu.catalogue import ATTENTION, FUNCTIONS, HEADS, KINDS, LAYERS, PROJECTIONS, TABLES
from kernels_ext_npu.reporting import release_limits
from kernels_ext_npu.swaps import add_norm_fusion, finders, refusals
from kernels_ext_npu.swaps.decision import Decision, Row, View

# functions come behind the others, with the tables that rotary ones take, and attention last, as their rows do
SHOWN = sorted(KINDS, key=lambda kind: (kind is ATTENTION, kind in (*FUNCTIONS, TABLES)))

SHARED = (
    "Functions are patched process-wide: other models of an architecture run the same kernels, and restore() affects "
    "all of them."
)


class Report:
    """The rows of a model; ``print(report)`` shows them as a table, by class, and equal layers on one line.

    Iterating over it, its length, ``summary()`` and ``to_json()`` are about ``rows``. Linear layers, of which a model
    has more than of all others together, are in ``projections`` and in the table.

    Attributes:
        rows: the modules and functions, without linear layers.
        projections: the linear layers that are called as such. The table shows them behind the rows.
        remark: what there is to say of the model beside them.
    """

    def __init__(self, rows: list[Row], projections: list[Row] | None = None, remark: str | None = None) -> None:
        self.rows, self.projections, self.remark = rows, projections or [], remark

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def summary(self) -> str:
        """Say how many of each kind are swapped: "9 of 9 norms, 2 of 2 gated MLPs"."""
        kinds = {
            kind.in_models: [row.swapped for row in self.rows if row.kind == kind.in_models] for kind in (*SHOWN, HEADS)
        }
        return ", ".join(f"{sum(rows)} of {len(rows)} {kind}" for kind, rows in kinds.items() if rows) or "nothing"

    def to_json(self) -> str:
        """Return a list of objects with path, class, kernel, swapped and reason, without linear layers."""
        return json.dumps(self.as_list(), indent=2)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the objects of to_json()."""
        return [_as_fields(row) for row in self.rows]

    def projections_as_list(self) -> list[dict[str, Any]]:
        """Return such objects for the linear layers."""
        return [_as_fields(row) for row in self.projections]

    def __rich__(self) -> Table:
        table = Table(title=f"{self.summary()} swapped", title_justify="left", box=box.SIMPLE_HEAD)
        if captions := self._captions():
            table.caption, table.caption_justify = "\n".join(captions), "left"
        table.add_column("class", max_width=25, overflow="fold")
        table.add_column("modules", overflow="fold")
        for class_name, served, modules in self._grouped():
            table.add_row(Text(f"{class_name}\n{served}"), Text("\n".join(modules)), end_section=True)
        return table

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        cells = (
            (html.escape(name), html.escape(served), "<br>".join(map(html.escape, modules)))
            for name, served, modules in self._grouped()
        )
        rows = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
        head = "<tr><th>class</th><th>kernel</th><th>modules</th></tr>"
        remark = "".join(f"<p>{html.escape(caption)}</p>" for caption in self._captions())
        title = html.escape(f"{self.summary()} swapped")
        return f"<p>{title}</p><table><thead>{head}</thead><tbody>{rows}</tbody></table>{remark}"

    def __repr__(self) -> str:
        return f"<Report: {self.summary()} swapped>"

    def _captions(self) -> list[str]:
        shared = SHARED if any(row.function is not None and row.swapped for row in self.rows) else None
        return [caption for caption in (shared, self.remark) if caption]

    def _grouped(self) -> Iterator[tuple[str, str, list[str]]]:
        """Give each class with what serves it or why nothing does, and the modules of which that is said."""
        groups: dict[tuple[str, str], Counter[str]] = {}
        for row in (*self.rows, *self.projections):
            served = f"→ {row.kernel}" if row.swapped else "not swapped"
            served += f": {row.reason}" if row.reason else ""
            paths = groups.setdefault((row.class_name, served), Counter())
            paths[re.sub(r"\b\d+\b", "*", row.path)] += 1
        for (class_name, served), paths in groups.items():
            yield class_name, served, [f"{count} × {path}" for path, count in paths.items()]

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def _as_fields(row: Row) -> dict[str, Any]:
    named = {"path": row.path, "class": row.class_name, "kernel": row.kernel}
    return named | {"swapped": row.swapped, "reason": row.reason}


def report(model: nn.Module) -> Report:
    """Report what was swapped, what was not, and why.

    Norms, gated MLPs, experts, routers, attention, rotary functions and tables, and heads of
    language models, each module and call by itself; linear layers apart from them, in ``report(model).projections``.

    Raises:
        TypeError: it is no module, such as the name of a model.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import kernels_ext_npu
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = kernels_ext_npu.kernelize(LlamaForCausalLM(config).to("npu"))
        >>> for row in kernels_ext_npu.report(model):
        ...     print(row.path, "->", row.kernel)
        model.layers.0.mlp -> SwiGLUMLP
        model.layers.0.input_layernorm -> RMSNorm
        model.layers.0.post_attention_layernorm -> RMSNorm
        model.norm -> RMSNorm
        model.rotary_emb -> RotaryEmbedding
        model.layers.0.self_attn.apply_rotary_pos_emb -> RotaryPosEmb
        model.layers.0.self_attn -> npu_flash_attention
        lm_head -> linear_cross_entropy
    """
    check_is_module("report", model)
    with assume_npu_if_meta(model):
        view = View(model)
        found = [d for finder in finders.FINDERS for d in finder.find(view) if d.kind is not None]
        served = [decision for decision in found if decision.is_served]
        remarks: dict[Decision, str] = {}
        for look in (release_limits.remarks, *(finder.remarks for finder in finders.FINDERS), _bypassed):
            remarks |= {decision: remark for decision, remark in look(view, served).items() if remark is not None}
        is_away = is_elsewhere(model)
        rows = [decision.row(remarks.get(decision), is_away) for decision in found]
        if any(module._forward_pre_hooks and lazy_swap.waits(module) for _, module in view.named):
            rows = [_at_first_call(row) for row in rows]
        linear_layers = [row for row in rows if row.kind == PROJECTIONS.in_models]
        modules = [row for row in rows if row.kind != PROJECTIONS.in_models]
        return Report(modules, linear_layers, add_norm_fusion.caption(view))


def _bypassed(view: View, served: list[Decision]) -> dict[Decision, str]:
    """Say where another library may compute without calling what was swapped: it replaced the forward around it."""
    paths = [
        (decision, decision.path if decision.function else decision.path.rpartition(".")[0]) for decision in served
    ]
    around = {decision: view.model.get_submodule(path) for decision, path in paths if decision.path}
    foreign: dict[nn.Module, str | None] = {}
    for module in {*around.values()}:
        foreign[module] = None if forward_binding.decorates_own(module) else forward_binding.foreign_forward(module)
    return {decision: refusals.bypassed_by(name) for decision, module in around.items() if (name := foreign[module])}


def _at_first_call(row: Row) -> Row:
    """Replace a reason that will pass by itself when the model is first called, where that is all there is."""
    passes = not row.swapped and getattr(row.reason, "code", None) in ("elsewhere", "not asked for")
    is_left_out = row.kernel in LAYERS and refusals.left_out(LAYERS[row.kernel]) is not None
    return replace(row, reason=refusals.AT_FIRST_CALL) if passes and not is_left_out else row
