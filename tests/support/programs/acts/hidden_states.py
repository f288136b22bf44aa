"""Acts on what goes from layer to layer where one token is decoded: saved, and written to behind every version."""

import io
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.programs.registry import act
from tests.support.programs.side import Side

MODES = (torch.no_grad, torch.inference_mode)


def _layers(side: Side) -> list[Any]:
    """Return the layers of the last list of some, which is the decoder's where there are two."""
    lists = [m for m in side.model.modules() if isinstance(m, nn.ModuleList)]
    named = [list(m) for m in lists if all(type(n).__name__.endswith(("Layer", "Block")) for n in m) and len(m)]
    return named[-1] if named else []


def _token(side: Side, **options: Any) -> Any:
    """Call the model with the first token of each sequence."""
    given = {key: side.inputs[key][:, :1] for key in ("input_ids", "decoder_input_ids") if key in side.inputs}
    return side.run_text(**given, labels=None, **options)


def _write(x: Tensor) -> None:
    x.data.add_(torch.linspace(-1, 2, x.shape[-1], device=x.device, dtype=x.dtype))


def _assert_is_saved(x: Tensor) -> None:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), x), "a hidden state that was saved"
    assert not vars(x), "a hidden state carries something"


@act(lambda side: bool(_layers(side)))
def call_layers_one_after_another(side: Side, choice: Random) -> None:
    """As somebody does who has a loop of their own: with what the model would give them, and writing in between."""
    calls: list[Any] = []
    note = lambda layer, args, kwargs: calls.append((layer, args, kwargs))  # noqa: E731
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in _layers(side)]
    with choice.choice(MODES)():
        _token(side)
        for handle in handles:
            handle.remove()
        x = calls[0][1][0] if calls and calls[0][1] else None
        for layer, args, kwargs in calls if x is not None else ():
            found = layer(x, *args[1:], **kwargs)
            x = found[0] if isinstance(found, tuple) else found
            _write(x)
            _assert_is_saved(x)
    if x is not None:
        side.show(x)


@act(lambda side: bool(_layers(side)))
def write_between_layers(side: Side, choice: Random) -> None:
    """By a hook of one of them, behind it or before it."""
    layer = choice.choice(_layers(side))
    if choice.random() < 0.5:
        handle = layer.register_forward_hook(
            lambda layer, args, found: _write(found[0] if isinstance(found, tuple) else found)
        )
    else:
        handle = layer.register_forward_pre_hook(lambda layer, args: _write(args[0]) if args else None)
    with choice.choice(MODES)():
        side.show(_token(side).logits)
    handle.remove()


@act()
def save_hidden_states(side: Side, choice: Random) -> None:
    with choice.choice(MODES)():
        outputs = _token(side, output_hidden_states=True)
    for state in outputs.get("hidden_states") or outputs.get("decoder_hidden_states") or ():
        _assert_is_saved(state)
        side.show(state)
