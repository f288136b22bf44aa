"""Call a model's forward by a graph: what it launches for one token is captured, and replayed from then on."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from kernels_ext_npu.decoding import python_state
from kernels_ext_npu.transformers_internals import cache_in

# Steps of a shape that run as they are, at most, until one changes nothing that Python keeps: the first may prepare
# tables, packed weights and masks.
WARMUPS = 3
TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
# Inputs of a value for each token. Only the last one's is for the step: generate hands on all that there were.
TOKEN_INPUTS = ("mm_token_type_ids", "token_type_ids")
# Steps in a row that no graph serves, since each has other shapes: windows that become full make two kinds of steps.
MOST_SHAPES = 4
LOGITS = "logits"  # the field of an output that `generate` copies at once


class CaptureError(RuntimeError):
    """A model's forward cannot be captured into a graph; the message says which part of it, and why."""


class GraphedForward:
    """Call a model as ``model(**inputs)``, by graphs where one token is decoded.

    A step with other shapes than before runs once as it is, and is captured when it comes again. Inputs are copied into
    those of the graph. What the result holds is overwritten by the next call, as its logits, or copied.

    Args:
        model: on the NPU. It must not change while this is used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._steps: dict[object, _Step] = {}
        self._pool: Any = None
        self._unserved: list[dict[str, object]] = []

    def __call__(self, **inputs: Any) -> Any:
        """Call the model, with a static cache.

        Raises:
            CaptureError: the forward waits for the device or changes what Python keeps, or its inputs other shapes.
        """
        named = cache_in(inputs)
        if named is None or not _decodes_one_token(inputs):
            return self._model(**inputs)
        name, cache = named
        inputs |= {name: inputs[name][..., -1:] for name in TOKEN_INPUTS if isinstance(inputs.get(name), Tensor)}
        leaves, tree = pytree.tree_flatten({key: value for key, value in inputs.items() if value is not cache})
        leaves = [_computed(leaf) for leaf in leaves]
        key = id(cache), python_state.phase(cache), tree, tuple(map(_description, leaves))
        step = self._steps.setdefault(key, _Step(self._model, name, cache))
        if step.graph is None and not step.is_settled:
            self._refuse_ever_new_shapes(inputs)
            return step.warm_up(pytree.tree_unflatten(leaves, tree) | {name: cache})
        self._unserved.clear()
        if step.graph is None:
            self._pool = self._pool or torch.get_device_module("npu").graph_pool_handle()
            step.capture(leaves, tree, self._pool)
        return step.replay(leaves)

    def _refuse_ever_new_shapes(self, inputs: dict[str, Any]) -> None:
        self._unserved.append({name: tuple(map(_description, pytree.tree_leaves(v))) for name, v in inputs.items()})
        if len(self._unserved) > MOST_SHAPES:
            before, now = self._unserved[-2:]
            names = ", ".join(name for name in now if before.get(name) != now[name])
            raise CaptureError(
                f"{type(self._model).__name__} cannot be decoded in graphs: every step has other inputs ({names}). "
                "Leave out compile_config"
            )


class _Step:
    """Hold the graph of one token, for inputs of certain shapes."""

    def __init__(self, model: nn.Module, name: str, cache: Cache) -> None:
        self._model, self._name, self._cache = model, name, cache
        self.graph: Any = None
        self.is_settled = False
        self._warmups = 0

    def warm_up(self, inputs: dict[str, Any]) -> Any:
        """Run a step as it is, and see whether Python keeps anything that it changes."""
        before = python_state.snapshot(self._model, self._cache)
        output = self._model(**inputs)
        self._warmups += 1
        changed = python_state.changed(before, python_state.snapshot(self._model, self._cache))
        self.is_settled = not changed
        if changed and self._warmups == WARMUPS:
            raise CaptureError(
                f"{type(self._model).__name__} cannot be decoded in graphs: every step changes what Python keeps, "
                f"which a graph does not replay: {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}. Leave "
                "out compile_config"
            )
        return output

    def capture(self, leaves: list[Any], tree: Any, pool: Any) -> None:
        """Capture a step. Nothing of it is computed, and nothing of what Python keeps is changed."""
        contiguous = torch.contiguous_format
        self._inputs = [x.clone(memory_format=contiguous) if isinstance(x, Tensor) else x for x in leaves]
        inputs = pytree.tree_unflatten(self._inputs, tree) | {self._name: self._cache}
        counts = [getattr(layer, python_state.COUNT) for layer in python_state.sliding_layers(self._cache)]
        npu = torch.get_device_module("npu")
        graph = npu.NPUGraph()
        try:
            with _no_collection(), npu.graph(graph, pool=pool):
                self._output = self._model(**inputs)
        except Exception as error:
            raise CaptureError(
                f"{type(self._model).__name__} cannot be decoded in graphs: capturing its forward failed in "
                f"{place(error)}: {str(error).splitlines()[0]}. Leave out compile_config"
            ) from error
        finally:
            for layer, count in zip(python_state.sliding_layers(self._cache), counts):
                setattr(layer, python_state.COUNT, count)
        self.graph = graph

    def replay(self, leaves: list[Any]) -> Any:
        """Run the graph for these inputs."""
        for own, given in zip(self._inputs, leaves):
            if isinstance(own, Tensor):
                own.copy_(given)
        self.graph.replay()
        python_state.advance(self._cache)
        return type(self._output)(
            **{
                k: v if k == LOGITS or isinstance(v, Cache) else pytree.tree_map_only(Tensor, torch.clone, v)
                for k, v in self._output.items()
                if v is not None
            }
        )


def place(error: BaseException) -> str:
    """Say where a model is at: the innermost line outside of torch and what is below it."""
    npu = torch.get_device_module("npu")
    below = {Path(torch.__file__).parent, Path(npu.__file__).parent.parent}
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in below)]
    named = [f for f in outside if "softnpu" not in Path(f.filename).parts] or outside or frames
    return f"{Path(named[-1].filename).name}, line {named[-1].lineno}, {named[-1].name}"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: what ends a memory pool waits for the device, which aborts while it captures."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decodes_one_token(inputs: dict[str, Any]) -> bool:
    tokens = next((inputs[name] for name in TOKENS if inputs.get(name) is not None), None)
    return tokens is not None and tokens.shape[1] == 1


def _computed(leaf: Any) -> Any:
    """Return the mask that is described: generate of transformers 5.24 hands descriptions on, anew in each step."""
    return leaf.mask() if hasattr(type(leaf), "mask") else leaf


def _description(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else id(leaf)
