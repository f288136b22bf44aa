"""List the mechanisms that put kernels into models: the files that each is made of, and how to do without it.

Whoever renames or removes one changes it here, and in ``way.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
        asked_for: whether a user has to ask for it: then it takes part in no other count.
    """

    name: str
    files: tuple[str, ...]
    acts: tuple[str, ...] = ACTS
    off: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    without: tuple[str, ...] = ()
    models: tuple[str, ...] = MODELS
    asked_for: bool = False

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
                owner, name = resolve_name(place.rpartition(".")[0]), place.rpartition(".")[2]
                replaced.append((owner, name, getattr(owner, name)))
                setattr(owner, name, replacement(getattr(owner, name)))
            yield
        finally:
            for owner, name, original in reversed(replaced):
                setattr(owner, name, original)


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _none_of(_: Any) -> Callable[..., Iterator]:
    return lambda *args, **kwargs: iter(())


def _serving_none(layers: Any) -> Any:
    return replace(layers, find=lambda model: iter(()))


def _of_mlps_alone(siblings_in: Callable) -> Callable:
    return lambda module: tuple(found for found in siblings_in(module) if "gate_proj" in found.names)


def _sum_and_norm(_: Any) -> Callable:
    import torch  # behind softnpu

    return lambda x, weight, eps: torch.ops.npu.npu_rms_norm(x, 1.0 + weight.float(), eps)


_SWAPPING = "kernels_ext_npu.swapping"

MECHANISMS = (
    Mechanism(
        "gate and up as one product",
        ("swapping/packing.py", "SwiGLU/torch-ext/swiglu/packing.py"),
        off=((f"{_SWAPPING}.packing.pairs", _none_of), (f"{_SWAPPING}.packing.JOINING", lambda _: ())),
    ),
    Mechanism(
        "layers with one input computed together",
        ("swapping/ahead.py", "swapping/siblings.py", "swapping/draws.py"),
        acts=(STEP, *ADAPTED),
        off=((f"{_SWAPPING}.ahead.note", _nothing),),
    ),
    Mechanism(
        "the same for q, k and v alone",
        (),
        acts=(STEP, *ADAPTED),
        off=((f"{_SWAPPING}.ahead.siblings_in", _of_mlps_alone),),
    ),
    Mechanism(
        "the same with dropout",
        ("swapping/draws.py",),
        acts=(DROPOUT,),
        off=((f"{_SWAPPING}.draws.are_captured", lambda _: lambda: True),),
    ),
    Mechanism(
        "plain linear layers",
        ("swapping/projections.py",),
        acts=(STEP, *ADAPTED),
        off=((f"{_SWAPPING}.projections.LAYERS", _serving_none),),
    ),
    Mechanism(
        "layers with adapters",
        ("swapping/adapters.py",),
        acts=ADAPTED,
        off=((f"{_SWAPPING}.adapters.LAYERS", _serving_none),),
    ),
    Mechanism(
        "sums with the norm behind them",
        ("swapping/residuals.py", "matching/residual_sums.py"),
        acts=(TOKEN,),
        off=((f"{_SWAPPING}.residuals.apply", _nothing),),
    ),
    Mechanism(
        "writes into a static cache",
        ("decoding/static_cache.py", "patterns/static_caches.py"),
        acts=(TOKEN,),
        off=(("kernels_ext_npu.decoding.static_cache.install", _nothing),),
    ),
    Mechanism(
        "the head without logits",
        (
            "swapping/heads.py",
            "swapping/deferred_logits.py",
            "swapping/logits_gradients.py",
            "swapping/logits_recipes.py",
        ),
        acts=(STEP, *ADAPTED),
        without=("CrossEntropy",),
    ),
    Mechanism(
        "norms with 1 + weight in one launch",
        (),
        acts=(FORWARD, TOKEN),
        off=(("torch.ops.npu.npu_gemma_rms_norm", _sum_and_norm),),
        models=("Gemma-3-12B", "Gemma-3-1B", "Qwen3-Next-80B-A3B"),
    ),
    Mechanism(
        "experts by the name of an implementation",
        ("swapping/experts/implementation.py",),
        off=((f"{_SWAPPING}.experts.install", _nothing),),
        models=MIXTURES,
    ),
    Mechanism(
        "experts stored the other way around",
        ("swapping/experts/saving.py", "swapping/experts/transposing.py"),
        acts=(FORWARD, LORA, TOKEN),
        models=MIXTURES,
        asked_for=True,
    ),
    Mechanism(
        "experts in a list",
        ("patterns/moe/moe_blocks_v4.py",),
        acts=(FORWARD, STEP, TOKEN),
        without=("FusedMoE",),
        models=(LISTS,),
    ),
)
