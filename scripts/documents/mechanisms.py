"""List the mechanisms that put kernels into models: the files that each is made of, and how to do without it.

Whoever renames or removes one changes it here, and in ``way.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

FORWARD, STEP, LORA, AUTOCAST, DROPOUT, TOKEN = ACTS = (
    "forward",
    "step",
    "LoRA step",
    "LoRA step, bf16",
    "LoRA step, dropout",
    "token",
)
ADAPTED = (LORA, AUTOCAST, DROPOUT)
MODELS = (
    "Qwen3-8B",
    "Llama-3.1-8B",
    "Gemma-3-12B",
    "Qwen3-30B-A3B",
    "gpt-oss-20b",
    "Qwen3-Next-80B-A3B",
    "Gemma-3-1B",
    "Qwen3-0.6B",
)
MIXTURES = ("Qwen3-30B-A3B", "gpt-oss-20b", "Qwen3-Next-80B-A3B")
LISTS = "Qwen3-30B-A3B, experts in a list"  # as transformers 4 has them, and remote code


@dataclass(frozen=True)
class Mechanism:
    """Something that could be left out, and models would compute the same.

    Attributes:
        name: in words.
        files: that it is made of, from ``integration/kernels_ext_npu``, or from the root where a kernel has them.
        acts: in which it takes part.
        off: what to replace to do without it, each by what a function makes of it.
        without: the kernel repositories that are left out with it.
        models: that have use for it.
    """

    name: str
    files: tuple[str, ...]
    acts: tuple[str, ...] = ACTS
    off: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    without: tuple[str, ...] = ()
    models: tuple[str, ...] = MODELS

    @property
    def lines(self) -> int:
        """How many lines its files have."""
        return sum(len(path.read_text("utf-8").splitlines()) for path in self.paths)

    @property
    def paths(self) -> list[Path]:
        """The files that it is made of."""
        own = ROOT / "integration" / "kernels_ext_npu"
        return [own / file if (own / file).exists() else ROOT / file for file in self.files]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do without it while the context is open: register and kernelize inside."""
        replaced = []
        try:
            for place, replacement in self.off:
                module, _, path = place.partition(":")
                outer, _, name = path.rpartition(".")
                replaced.append((resolve_name(f"{module}:{outer}" if outer else module), name, resolve_name(place)))
                setattr(*replaced[-1][:2], replacement(replaced[-1][2]))
            yield
        finally:
            for owner, name, original in reversed(replaced):
                setattr(owner, name, original)


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _find_nothing(_: Any) -> Callable[..., Iterator]:
    return lambda *args, **kwargs: iter(())


def _all_but(name: str) -> Callable[[Any], tuple]:
    return lambda finders: tuple(finder for finder in finders if finder.name != name)


def _sum_and_norm(_: Any) -> Callable:
    import torch  # behind softnpu

    return lambda x, weight, eps: torch.ops.npu.npu_rms_norm(x, 1.0 + weight.float(), eps)


_SWAPS = "kernels_ext_npu.swaps"

MECHANISMS = (
    Mechanism(
        "gate and up as one product",
        ("swaps/gate_up_layout.py", "SwiGLU/torch-ext/swiglu/packing.py"),
        off=(
            (f"{_SWAPS}.gate_up_layout:WITH_GATE_AND_UP", lambda _: ()),
            (f"{_SWAPS}.gate_up_layout:JOINING", lambda _: ()),
        ),
    ),
    Mechanism(
        "layers with one input computed together",
        ("swaps/linear/linear_groups.py", "syntax/shared_inputs.py"),
        acts=ADAPTED,
        off=((f"{_SWAPS}.linear.lora:_current_layers", _nothing),),
    ),
    Mechanism(
        "the same for q, k and v alone",
        (),
        acts=ADAPTED,
        off=((f"{_SWAPS}.linear.linear_groups:shared_input_groups", _find_nothing),),
    ),
    Mechanism(
        "layers with adapters",
        ("swaps/linear/lora.py",),
        acts=ADAPTED,
        off=((f"{_SWAPS}.finders:FINDERS", _all_but("linear layers")),),
    ),
    Mechanism(
        "heads that share a key not repeated",
        ("swaps/shared_heads.py", "syntax/repeated_heads.py"),
        acts=(FORWARD, STEP),
        off=((f"{_SWAPS}.finders:FINDERS", _all_but("shared heads")),),
        models=("Qwen3-Next-80B-A3B",),
    ),
    Mechanism(
        "sums with the norm behind them",
        ("swaps/add_norm_fusion.py", "syntax/residuals.py"),
        acts=(TOKEN,),
        off=((f"{_SWAPS}.finders:FINDERS", _all_but("sums and norms")),),
    ),
    Mechanism(
        "writes into a static cache",
        ("decoding/static_cache.py",),
        acts=(TOKEN,),
        off=(("kernels_ext_npu.decoding.static_cache:install", _nothing),),
    ),
    Mechanism(
        "the head without logits",
        (
            "binding/forward_with_labels.py",
            "swaps/loss/lm_head_loss.py",
            "swaps/loss/deferred_logits.py",
            "swaps/loss/gradients.py",
            "swaps/loss/steps.py",
        ),
        acts=(STEP, *ADAPTED),
        without=("CrossEntropy",),
    ),
    Mechanism(
        "norms with 1 + weight in one launch",
        (),
        acts=(FORWARD, TOKEN),
        off=(("torch:ops.npu.npu_gemma_rms_norm", _sum_and_norm),),
        models=("Gemma-3-12B", "Gemma-3-1B", "Qwen3-Next-80B-A3B"),
    ),
    Mechanism(
        "experts by the name of an implementation",
        ("swaps/experts.py",),
        off=((f"{_SWAPS}.finders:FINDERS", _all_but("experts")),),  # which register() installs
        models=MIXTURES,
    ),
    Mechanism(
        "experts in a list",
        ("patterns/moe_blocks_v4.py",),
        acts=(FORWARD, STEP, TOKEN),
        without=("FusedMoE",),
        models=(LISTS,),
    ),
)
