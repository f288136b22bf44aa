"""Write the way of a model from ``register()`` to ``restore()``, with the functions that it passes in the code."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from documents.mechanisms import ROOT


class Step(NamedTuple):
    """A step of the way.

    Attributes:
        name: in a word or two, as in the picture of `docs/design.md`.
        does: what happens, in a sentence.
        functions: where, each as ``module:function`` in the integration.
    """

    name: str
    does: str
    functions: tuple[str, ...]


WAY = (
    Step(
        "register",
        "Our kernels go into transformers' mapping of layers, and methods that models call are wrapped. `Patches` "
        "remembers all of it, and `unregister()` undoes it.",
        ("lifecycle.register:register", "swaps.layers:install", "binding.patches:Patches"),
    ),
    Step(
        "enter",
        "`from_pretrained(use_kernels=True)`, `kernelize(model)` and, with `everywhere=True`, the first call of a "
        "model go through one sequence: each finder decides of the sites of its kind, and what it decides is put in.",
        (
            "lifecycle.kernelize:kernelize",
            "lifecycle.pipeline:install",
            "lifecycle.pipeline:run",
            "swaps.decision:Finder",
            "swaps.decision:Decision",
        ),
    ),
    Step(
        "match",
        "The forward of each class, and the helpers that it calls, have a fingerprint. Where that is known, a pattern "
        "names the layer, if nothing on the instance stands against it. Norms, gated MLPs, activations and routers of "
        "other people's code are run instead.",
        (
            "swaps.layers:find",
            "matching.lookup:find_pattern",
            "matching.known_forwards:known_name",
            "recognition.modules:recognise",
        ),
    ),
    Step(
        "layers",
        "The package `kernels` picks the variant of a repository that fits the machine, and binds the forward of the "
        "layer that serves a module to it.",
        ("lifecycle.pipeline:bind_layers_on_npu", "distribution.kernels_internals:bind_layers"),
    ),
    Step(
        "functions",
        "Functions that modules call, such as rotary ones and scans, are found in the globals of their forwards, and "
        "compared and swapped alike. One function serves all models of the process.",
        ("swaps.functions:find", "matching.function_scan:called_functions"),
    ),
    Step(
        "shared heads",
        "Layers that repeat queries and keys for heads that share them, as transformers writes it before a gated delta "
        "rule, hand them to the kernel as they are.",
        ("swaps.shared_heads:find", "syntax.repeated_heads:without_repeats"),
    ),
    Step(
        "attention",
        "What a config calls `sdpa` means the kernel on the NPU; the config stays as it is.",
        ("swaps.attention:find", "swaps.attention.calls:kernel_or_sdpa"),
    ),
    Step(
        "experts",
        "A mixture of experts without an explicit implementation uses the kernel, by the name of one in its config.",
        ("swaps.experts:put", "swaps.experts:npu_grouped_mm"),
    ),
    Step(
        "loss",
        "The head of a language model hands its loss hidden states: the logits of a training step are not computed, "
        "unless the output still exists when the loss runs backward.",
        ("swaps.loss.lm_head_loss:find", "swaps.loss.deferred_logits:DeferredLogits"),
    ),
    Step(
        "linear",
        "Linear layers that compressed-tensors keeps in few bits are multiplied so. Each with adapters of peft is one "
        "node of autograd, and those that are called with one input are one.",
        ("swaps.linear.compressed_linear:find", "swaps.linear.lora:find", "swaps.linear.linear_groups:called_next"),
    ),
    Step(
        "gate and up",
        "The two weights of an MLP are laid side by side, so that one product gives both.",
        ("swaps.gate_up_layout:put",),
    ),
    Step(
        "sums and norms",
        "During decoding, the residual sums behind attention and MLP are fused with the norms that follow.",
        ("swaps.add_norm_fusion:put", "syntax.residuals:find_sums", "syntax.residuals:layer_loop"),
    ),
    Step(
        "call",
        "The model runs: each forward of ours asks a predicate, call by call, whether the operator takes these "
        "tensors, and computes in torch where it does not.",
        ("swaps.attention.calls:npu_flash_attention_mask", "binding.step_aside:guarded_forward"),
    ),
    Step(
        "report",
        "The same finders look at the model as it is now. Every module and function that a kernel might serve has a "
        "row: swapped, or why not.",
        ("reporting.report:report", "swaps.decision:Row"),
    ),
    Step(
        "restore",
        "What was put into the model is taken out, in all of these places.",
        ("lifecycle.kernelize:restore", "lifecycle.register:unregister"),
    ),
)


def table(_: str) -> str:
    """Write a row for each step, with links to the files; `docs/design.md` is in English."""
    lines = ["| step | what happens | in the code |", "|---|---|---|"]
    for number, step in enumerate(WAY, 1):
        links = " ".join(_link(place) for place in step.functions)
        lines.append(f"| {number} {step.name} | {step.does} | {links} |")
    return "".join(f"{line}\n" for line in lines)


def _link(place: str) -> str:
    module, _, name = place.partition(":")
    path = Path("integration", "kernels_ext_npu", *module.split("."))
    file = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
    return f"[`{module}.{name}`](../{file.as_posix()})"
