"""Layers of a model that are alike: what a few of them cost tells what all of them cost.

Alike are members of one list of a model with the same classes, shapes and settings. A layer that is not to run hands
its input on; it stays where it is, so that the model's own code sees as many layers as there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import PreTrainedModel

from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.swaps import add_norm_fusion

_INPUT = object()  # stands for the input in what a layer gives


class NotRepeatableError(Exception):
    """A layer does not give what it takes: the next ones cannot do without it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(eq=False)
class Kind:
    """Layers that are alike, at least three, in the order in which they run."""

    layers: list[nn.Module]
    output: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The class of the layers, without what FSDP2 puts in front of it."""
        name = type(self.layers[0]).__name__
        return name.removeprefix("FSDP") if isinstance(self.layers[0], FSDPModule) else name

    @property
    def left_out(self) -> int:
        """How many of the layers do not run: all but the first and the last one."""
        return len(self.layers) - 2

    def note(self, _: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Keep what the first layer gives: its hook.

        A sign is in the place of what has the input's shape, and what makes another tensor in that of any other.
        """
        shape = _first_tensor(args, kwargs).shape

        def leaf(value: Tensor) -> object:
            if value.shape == shape:
                return _INPUT
            return partial(torch.empty, value.shape, dtype=value.dtype, device=value.device)

        self.output = tree_map_only(Tensor, leaf, output)

    def hand_on(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Give what the first layer gave, with the input in the place of the sign: the forward of a layer left out.

        What the layer before has normed for this one goes to the layer behind it: each layer norms for the next.
        """
        if not any(leaf is _INPUT for leaf in tree_leaves(self.output)):
            raise NotRepeatableError(self)
        given = _first_tensor(args, kwargs)
        add_norm_fusion.hand_on(layer, given)

        def value(leaf: Any) -> Any:
            return leaf() if isinstance(leaf, partial) else given if leaf is _INPUT else leaf

        return tree_map(value, self.output)


def find_kinds(model: PreTrainedModel) -> list[Kind]:
    """Find the kinds of layers of which there are at least three; nothing inside such a layer counts by itself."""
    found: list[Kind] = []
    inside: set[nn.Module] = set()
    configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        alike: dict[str, list[nn.Module]] = {}
        for layer, signature in zip(module, _signatures(module, configs)):
            alike.setdefault(signature, []).append(layer)
        repeated = [Kind(layers) for layers in alike.values() if len(layers) > 2]
        found += repeated
        inside |= {inner for kind in repeated for layer in kind.layers for inner in layer.modules()}
    return found


@contextmanager
def few(kinds: list[Kind], one_more: Kind | None) -> Iterator[None]:
    """Run the first and the last layer of each kind only, and of one kind the second one too."""
    hooks, left_out = [], []
    for kind in kinds:
        hooks.append(kind.layers[0].register_forward_hook(kind.note, with_kwargs=True))
        for layer in kind.layers[2 if kind is one_more else 1 : -1]:
            left_out.append((layer, vars(layer).get("forward"), layer._forward_pre_hooks, layer._forward_hooks))
            layer.forward = partial(kind.hand_on, layer)
            layer._forward_pre_hooks, layer._forward_hooks = OrderedDict(), OrderedDict()  # FSDP2 gathers in them
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, forward, layer._forward_pre_hooks, layer._forward_hooks in left_out:
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _signatures(layers: nn.ModuleList, configs: list[Any]) -> list[str]:
    """Return a text for each layer, which is equal for layers that cost the same.

    It is made of their modules, tensors and settings, and of what configs say of them.
    """
    settings = [_settings(layer) for layer in layers]
    offsets: dict[str, set[int | None]] = {}
    for position, values in enumerate(settings):
        for key, value in values.items():
            # how far a number, which may be the index of a layer, is from the layer's position
            offsets.setdefault(key, set()).add(value - position if isinstance(value, int) else None)
    indices = {key for key, found in offsets.items() if len(found) == 1 and None not in found}
    lists = [
        (name, value)
        for config in configs
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == len(layers)
    ]
    return [
        repr(
            (
                sorted((key, value) for key, value in settings[position].items() if key not in indices),
                [
                    (path, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad)
                    for path, t in [*layer.named_parameters(), *layer.named_buffers()]
                ],
                [(name, value[position]) for name, value in lists],
            )
        )
        for position, layer in enumerate(layers)
    ]


def _settings(layer: nn.Module) -> dict[str, Any]:
    """Return the classes of the modules of a layer and their simple attributes.

    A float counts only as zero or not.
    """
    settings: dict[str, Any] = {}
    for path, module in layer.named_modules():
        settings[path] = type(module).__qualname__
        for name, value in vars(module).items():
            if isinstance(value, float):
                settings[f"{path}.{name}"] = f"float {value == 0}"
            elif isinstance(value, bool | str):
                settings[f"{path}.{name}"] = str(value)
            elif isinstance(value, int):
                settings[f"{path}.{name}"] = value
            elif hasattr(value, "__func__"):  # a kernel in the place of a forward
                settings[f"{path}.{name}"] = value.__func__.__qualname__
    return settings


def _first_tensor(args: tuple, kwargs: dict) -> Tensor:
    return tensors((kwargs.get("hidden_states"), args, kwargs))[0]
