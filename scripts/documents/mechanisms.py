"""List the mechanisms that put kernels into a model: the files that each is made of, and how to do without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

_ROOM = "kernels_ext_npu"

FORWARD, STEP, LORA, LORA_AUTOCAST, LORA_DROPOUT, TOKEN = ACTS = (
    "forward",
    "step",
    "LoRA, float32",
    "LoRA, bfloat16, autocast",
    "LoRA, dropout",
    "token",
)
_LORA = (LORA, LORA_AUTOCAST, LORA_DROPOUT)


@dataclass(frozen=True)
class Mechanism:
    """Something that could be left out, and models would compute the same.

    Attributes:
        name: in words.
        files: that it is made of, from the root of the clone; patterns may be in them.
        acts: in which it takes part.
        off: what to replace to do without it, by "module:attribute", each by what a function makes of it.
        without: the kernel repositories that are left out with it.
        models: of these alone; of all by default.
        asked_for: whether a user has to call for it: then it is in no other count.
    """

    name: str
    files: tuple[str, ...]
    acts: tuple[str, ...] = ACTS
    off: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    without: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    asked_for: bool = False

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do without it while the context is open: models have to be kernelized inside."""
        undo = []
        try:
            for place, replacement in self.off:
                module, _, name = place.partition(":")
                owner = import_module(f"{_ROOM}.{module}")
                undo.append((owner, name, getattr(owner, name)))
                setattr(owner, name, replacement(undo[-1][2]))
            yield
        finally:
            for owner, name, original in reversed(undo):
                setattr(owner, name, original)


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _none_of(_: Any) -> Callable[..., Iterator]:
    return lambda *args, **kwargs: iter(())


def _serving_none(layers: Any) -> Any:
    return replace(layers, find=lambda model: iter(()))


def _of_mlps_alone(siblings_in: Callable) -> Callable:
    """Leave gate and up, which an MLP of ours calls."""
    return lambda module: tuple(s for s in siblings_in(module) if "gate_proj" in s.names)


MECHANISMS = (
    Mechanism(
        "gate and up as one product",
        ("swapping/packing.py", "SwiGLU:packing.py"),
        off=(("swapping.packing:pairs", _none_of), ("swapping.packing:JOINING", lambda _: ())),
    ),
    Mechanism(
        "looking ahead: all layers with one input",
        ("swapping/ahead.py", "swapping/siblings.py", "swapping/draws.py"),
        acts=(STEP, *_LORA),
        off=(("swapping.ahead:note", _nothing),),
    ),
    Mechanism(
        "looking ahead for q, k and v alone",
        ("swapping/ahead.py", "swapping/siblings.py", "swapping/draws.py"),
        acts=(STEP, *_LORA),
        off=(("swapping.ahead:siblings_in", _of_mlps_alone),),
    ),
    Mechanism(
        "random numbers replayed for dropout",
        ("swapping/draws.py",),
        acts=(LORA_DROPOUT,),
        off=(("swapping.draws:are_captured", lambda _: lambda: True),),
    ),
    Mechanism(
        "plain linear layers",
        ("swapping/projections.py",),
        acts=(STEP, *_LORA),
        off=(("swapping.projections:LAYERS", _serving_none),),
    ),
    Mechanism(
        "adapters",
        ("swapping/adapters.py",),
        acts=_LORA,
        off=(("swapping.adapters:LAYERS", _serving_none),),
    ),
    Mechanism(
        "sums with the norm behind them",
        ("swapping/residuals.py", "matching/residual_sums.py"),
        acts=(TOKEN,),
        off=(("swapping.residuals:take", _nothing),),
    ),
    Mechanism(
        "writes into a static cache",
        ("decoding/static_cache.py", "references/static_caches.py"),
        acts=(TOKEN,),
        off=(("decoding.static_cache:install", _nothing),),
    ),
    Mechanism("the head without logits", ("swapping/heads.py",), acts=(STEP, *_LORA), without=("CrossEntropy",)),
    Mechanism(
        "norms with 1 + weight in one launch",
        ("RMSNorm:functional.py",),
        acts=(FORWARD, TOKEN),
        models=("Gemma-3-12B", "Gemma-3-1B", "Qwen3-Next-80B-A3B"),
    ),
    Mechanism(
        "experts' own implementation",
        ("swapping/experts_interface.py",),
        off=(("swapping.experts_interface:is_installed", lambda _: lambda: False),),
        models=("Qwen3-30B-A3B", "gpt-oss-20b", "Qwen3-Next-80B-A3B"),
    ),
    Mechanism(
        "transpose_experts",
        ("swapping/saving.py",),
        acts=(FORWARD, LORA, TOKEN),
        models=("Qwen3-30B-A3B", "gpt-oss-20b", "Qwen3-Next-80B-A3B"),
        asked_for=True,
    ),
)
