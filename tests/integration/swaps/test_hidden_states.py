"""Hidden states in a step of decoding are plain tensors, and what is written to one between two layers counts.

Nothing tells of a write through ``.data``: what was normed ahead would be of the state before it.
"""

import functools
import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

import kernels_ext_npu
from tests.support import npu_counts, zoo
from tests.support.nearness import assert_each_near

NAMES = ["llama", "qwen3", "gemma3_text", "olmo2", "mixtral"]
LAUNCH = "npu_add_rms_norm"
# Both are float32, with sums of some ten terms in another order: values of size one differ by some 1e-6.
assert_equal = partial(assert_each_near, tolerance=1e-5)

pytestmark = pytest.mark.usefixtures("registered")


def add_through_data(x: Tensor) -> None:
    """Write where no version tells, other numbers to each element, so that no norm takes them out."""
    x.data.add_(torch.linspace(-1.0, 2.0, x.shape[-1], device=x.device))


def qwen3(layers: int = 3, cls: type[nn.Module] = Qwen3Model) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.model.__class__ = cls
    return model


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Make a model on the CPU, and the same with kernels on the NPU."""
    return make(), kernels_ext_npu.kernelize(make().to("npu"))


def one_after_another(model: Any, change: Callable[[Tensor], object], layers: Any = None) -> Tensor:
    """Run the layers of a model on one token as its user, who does something to what each of them gives."""
    text = model.model
    with torch.no_grad():
        x = text.embed_tokens(torch.tensor([[5]], device=model.device))
        places = torch.tensor([[3]], device=model.device)
        for layer in text.layers if layers is None else layers:
            names = inspect.signature(type(text.rotary_emb).forward).parameters
            tables = text.rotary_emb(x, places, *((layer.self_attn.layer_type,) if "layer_type" in names else ()))
            x = layer(x, position_embeddings=tables, position_ids=places, attention_mask=None)
            change(x)
            assert not any(vars(tensor) for tensor in (x, *tables))
        return text.norm(x)


def step(model: Any, **options: Any) -> Any:
    """Decode one token behind ten."""
    ids, cache = torch.arange(10).view(1, 10).to(model.device), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        npu_counts.reset()
        return model(ids[:, :1], past_key_values=cache, **options)


def saved(x: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_their_user_calls_see_what_was_written_between_them(name: str) -> None:
    model, ours = both(lambda: zoo.build(name).eval())
    expected = one_after_another(model, add_through_data)
    assert_equal(one_after_another(ours, add_through_data), expected)
    assert (one_after_another(ours, lambda x: None).cpu() - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_what_a_layer_gives_is_saved_and_loaded_as_any_tensor(name: str) -> None:
    ours = kernels_ext_npu.kernelize(zoo.build(name).eval().to("npu"))

    def look(x: Tensor) -> None:
        assert torch.equal(torch.load(io.BytesIO(saved(x)), weights_only=True), x)
        assert len(saved(x)) == len(saved(x.clone()))

    one_after_another(ours, look)


@pytest.mark.parametrize("name", NAMES)
def test_what_outputs_and_hooks_keep_is_plain(name: str) -> None:
    model, ours = both(lambda: zoo.build(name).eval())
    kept: list[Tensor] = []
    for layer in ours.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: kept.extend((*args, output)))
        layer.mlp.register_forward_pre_hook(lambda module, args: kept.extend(args))
    found = step(ours, output_hidden_states=True).hidden_states
    for one, other in zip(found, step(model, output_hidden_states=True).hidden_states, strict=True):
        assert_equal(one, other)
    for tensor in (*found, *kept):
        assert not vars(tensor)
        torch.load(io.BytesIO(saved(tensor)), weights_only=True)


class OwnLoop(Qwen3Model):
    """Writes between its layers."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs: Any) -> Any:
        hidden_states = self.embed_tokens(input_ids)
        places = torch.full_like(input_ids, 7)
        position_embeddings = self.rotary_emb(hidden_states, places)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings, attention_mask=None)
            add_through_data(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


def lying(forward: Callable) -> Callable:
    """Put a forward with another loop in the place of one, under its name."""
    return functools.wraps(forward)(lambda self, *args, **kwargs: OwnLoop.forward(self, *args, **kwargs))


class Before(nn.Module):
    """Writes before what it wraps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        add_through_data(hidden_states)
        return self.layer(hidden_states, **kwargs)


def wrap_a_layer(model: Any) -> None:
    model.model.layers[1] = Before(model.model.layers[1])


def call_otherwise(model: Any) -> None:
    class Called(type(model.model.layers[1])):  # type: ignore[misc]
        def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            add_through_data(hidden_states)
            return super().__call__(hidden_states, *args, **kwargs)

    model.model.layers[1].__class__ = Called


@pytest.mark.parametrize("change", [wrap_a_layer, call_otherwise])
@pytest.mark.parametrize("again", [False, True])
def test_what_somebody_puts_between_two_layers_is_seen(change: Callable[[Any], None], again: bool) -> None:
    model, ours = both(qwen3)
    plain = step(model).logits
    for each in (model, ours):
        change(each)
    if again:
        kernels_ext_npu.kernelize(ours)
    expected = step(model).logits
    assert_equal(step(ours).logits, expected)
    assert (expected - plain).abs().max() > 0.01


def test_a_model_with_a_loop_of_its_own_may_write_between_its_layers(monkeypatch) -> None:
    ids = torch.tensor([[5]])
    model, ours = both(partial(qwen3, cls=OwnLoop))
    with torch.no_grad():
        expected = model(ids).logits
        assert_equal(ours(ids.npu()).logits, expected)
        for later in (False, True):
            model, ours = both(qwen3)
            with monkeypatch.context() as changed:
                changed.setattr(Qwen3Model, "forward", lying(Qwen3Model.forward))
                if later:
                    kernels_ext_npu.kernelize(ours)
                assert_equal(ours(ids.npu(), use_cache=False).logits, expected)


def test_layers_called_inside_of_another_one_see_what_was_written_between_them() -> None:
    found = []
    for model in both(qwen3):
        layers, inner = model.model.layers, []

        def call_others(module: nn.Module, *_: Any, model=model, layers=layers, inner=inner) -> None:
            inner.append(one_after_another(model, add_through_data, layers[:2]))

        handle = layers[2].mlp.register_forward_hook(call_others)
        logits = step(model).logits
        handle.remove()
        found.append((inner[-1], logits))
    for one, other in zip(*reversed(found)):
        assert_equal(one, other)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_vl"])
def test_the_loop_of_a_model_norms_for_the_next_layer_in_one_launch(name: str) -> None:
    ours = kernels_ext_npu.kernelize(zoo.build(name).eval().to("npu"))
    layers = ours.config.get_text_config().num_hidden_layers
    step(ours)
    assert npu_counts.read()[LAUNCH] == 2 * layers - 1
    with torch.inference_mode():
        one = ours(torch.tensor([[5]], device="npu")).logits
        npu_counts.reset()
        ours(torch.tensor([[5]], device="npu"))
        assert npu_counts.read()[LAUNCH] == 2 * layers - 1
    with torch.no_grad():
        assert torch.equal(ours(torch.tensor([[5]], device="npu")).logits, one)
