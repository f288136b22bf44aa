"""What was swapped in a model, and what was not, and why. Read from the model as it is, not from what was planned."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from kernels_ext_npu.api import register
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.lookup import find_reference
from kernels_ext_npu.references import REFERENCES
from kernels_ext_npu.swapping import expert_lists, experts, experts_choice, experts_interface, packing, rotary, waiting
from kernels_ext_npu.swapping.classes import device_of, on_its_way, refusal, replaced
from kernels_ext_npu.swapping.forwards import kernel_forward, kernel_name

# what the kernels of a repository serve, or a kind of their layers, as the table counts it
KINDS = {
    "RMSNorm": "norms",
    "SwiGLU": "gated MLPs",
    "FusedMoE": "experts",
    "Router": "routers",
    "RoPE": "rotary calls",
    "RotaryEmbedding": "rotary tables",
}
_KIND_OF_LAYER = LAYERS | {layer: r.kind or r.repository for r in REFERENCES for layer in r.layers}
# norms that are no RMS norms, so that no kernel could be missing for them
_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
_ROUTER, _EXPERTS = re.compile("Router$|Gate$|Gating$"), re.compile("Experts$|NaiveMoe$")
# the projections of gated MLPs, as transformers names them
_GATED = (
    {"gate_proj", "up_proj"},
    {"gate_up_proj", "down_proj"},
    {"w1", "w2", "w3"},
    {"wi_0", "wi_1"},
    {"input_linear", "output_linear"},
)


@dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        path: its name in the model.
        class_name: its class.
        kernel: the layer that serves it or would serve it, None if there is none.
        swapped: whether the kernel's forward is in place.
        reason: why not, or why not as fast as it could be; None if there is nothing to say.
        is_candidate: whether one would expect a kernel for it; not so for a LayerNorm, nor for frequencies that change,
            nor for what register(kernels=...) leaves out.
        kind: what it is, as the table counts it.
    """

    path: str
    class_name: str
    kernel: str | None
    swapped: bool
    reason: str | None
    is_candidate: bool = True
    kind: str = "norms"


class Report:
    """The rows of a model; ``print(report)`` shows them as a table, by class, and equal layers on one line."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def summary(self) -> str:
        """How many of each kind are swapped: "9 of 9 norms, 2 of 2 gated MLPs"."""
        kinds = {kind: [row.swapped for row in self.rows if row.kind == kind] for kind in KINDS.values()}
        return ", ".join(f"{sum(rows)} of {len(rows)} {kind}" for kind, rows in kinds.items() if rows) or "nothing"

    def to_json(self) -> str:
        """A list of objects with path, class, kernel, swapped and reason."""
        return json.dumps(self.as_list(), indent=2)

    def as_list(self) -> list[dict[str, Any]]:
        """The objects of to_json()."""
        rows = []
        for row in self.rows:
            fields = asdict(row)
            fields["class"] = fields.pop("class_name")
            rows.append({key: fields[key] for key in ("path", "class", "kernel", "swapped", "reason")})
        return rows

    def __rich__(self) -> Table:
        table = Table(title=f"{self.summary()} swapped", title_justify="left", box=box.SIMPLE_HEAD)
        if any(row.kind == KINDS["RoPE"] and row.swapped for row in self.rows):
            table.caption, table.caption_justify = rotary.SHARED, "left"
        table.add_column("class", max_width=25, overflow="fold")
        table.add_column("modules", overflow="fold")
        groups: dict[tuple[str, str], Counter[str]] = {}
        for row in self.rows:
            served = f"→ {row.kernel}" if row.swapped else "kept"
            served += f": {row.reason}" if row.reason else ""
            paths = groups.setdefault((row.class_name, served), Counter())
            paths[re.sub(r"\b\d+\b", "*", row.path)] += 1
        for (class_name, served), paths in groups.items():
            modules = "\n".join(f"{count} × {path}" for path, count in paths.items())
            table.add_row(Text(f"{class_name}\n{served}"), Text(modules), end_section=True)
        return table

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def report(model: nn.Module) -> Report:
    """Every norm, gated MLP, experts module, router, rotary function and rotary table: swapped, or kept and why.

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
    """
    with on_its_way(model):
        modules = dict(model.named_modules())
        rows = [_row(path, module, kind) for path, module in modules.items() if (kind := _kind(module)) is not None]
        rows = [_passed_by(row, modules) for row in (*rows, *rotary.rows(model))]
        if any(map(waiting.waits, modules.values())):
            rows = [_expected(row, modules) for row in rows]
        return Report(rows)


def _passed_by(row: Row, modules: dict[str, nn.Module]) -> Row:
    """With a remark where another library may compute without calling what was swapped."""
    stranger = replaced(modules[row.path.rpartition(".")[0]]) if row.swapped and row.path else None
    if stranger is None:
        return row
    return replace(row, reason=f"but another library replaced the forward around it, and may not call it: {stranger}")


def _expected(row: Row, modules: dict[str, nn.Module]) -> Row:
    """With the reason that will pass by itself, where that is all there is."""
    if row.swapped or row.kernel is None or register.left_out(LAYERS[row.kernel]) is not None:
        return row
    module = modules.get(row.path)  # none: a function
    if module is not None and device_of(module) in ("npu", None) and refusal(module) is not None:
        return row
    return replace(row, reason="swapped in when the model is first called on the NPU")


def _kind(module: nn.Module) -> str | None:
    reference = find_reference(type(module))
    layer = reference.layers[0] if reference else getattr(type(module), "kernel_layer_name", "")
    if layer in _KIND_OF_LAYER:
        return KINDS[_KIND_OF_LAYER[layer]]
    if "norm" in type(module).__name__.lower() and not any(module.children()):
        return KINDS["RMSNorm"]
    if _ROUTER.search(type(module).__name__) and hasattr(module, "top_k"):
        return KINDS["Router"]
    if _EXPERTS.search(type(module).__name__):
        return KINDS["FusedMoE"]
    children = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    return KINDS["SwiGLU"] if any(names <= children for names in _GATED) else None


def _row(path: str, module: nn.Module, kind: str) -> Row:
    class_name = type(module).__name__
    candidate = not isinstance(module, _OTHER_NORMS) and not _is_other(module, kind)
    function = kernel_forward(module)
    if function is not None:
        layer = function.__qualname__.partition(".")[0]
        if _is_ours(kernel_name(function)) and layer in LAYERS:
            apart = packing.separate(module)
            reason = f"two products, since {apart}" if apart else experts.remark(module) or expert_lists.remark(module)
            return Row(path, class_name, layer, True, reason, kind=kind)
        reason = f"served by {layer} of the kernel {kernel_name(function)}, which is not ours"
        return Row(path, class_name, None, False, reason, candidate, kind)
    if experts.is_called_by_name(module):
        reason = experts.remark(module) or f"called by its own forward, as {experts_choice.NAME}"
        return Row(path, class_name, experts_interface.LAYER, True, reason, kind=kind)
    reference = find_reference(type(module))
    layer_name = reference.layer(module) if reference else None
    return Row(path, class_name, layer_name, False, _reason(module), candidate, kind)


def _is_other(module: nn.Module, kind: str) -> bool:
    """Whether no kernel in use is meant for it: it makes cos and sin, or routes, in another way, or none was wanted."""
    reference = find_reference(type(module))
    if reference is not None and register.left_out(reference.repository) is not None:
        return True
    if kind == KINDS["Router"]:
        return reference is None
    return kind == KINDS["RotaryEmbedding"] and (reference is None or reference.refuse(module) is not None)


def _reason(module: nn.Module) -> str:
    if isinstance(module, _OTHER_NORMS) and find_reference(type(module)) is None:
        return "not an RMS norm"
    reason = refusal(module)
    if reason is not None:
        return reason
    if register.current is None:
        return "kernels are not registered: call kernels_ext_npu.register() before the model is loaded"
    return "the model was loaded without use_kernels=True, or its kernels were taken out: call kernelize(model)"


def _is_ours(name: str | None) -> bool:
    """By a kernel's name, which is that of its repository in lower case, with a hyphen here and there."""
    return name is not None and name.replace("-", "") in {repository.lower() for repository in LAYERS.values()}
