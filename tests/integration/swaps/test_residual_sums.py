"""Steps of decoding with sums in one launch with their norms: which layers, what they give, and when they do not."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

import kernels_ext_npu
from tests.support import npu_counts, zoo
from tests.support.nearness import assert_each_near

OWN = Qwen3DecoderLayer.forward  # before any kernel is swapped in
LAUNCH = "npu_add_rms_norm"
LAYERS = 36
# Both are float32, with sums of some ten terms in another order: logits of size one differ by some 1e-6.
assert_equal = partial(assert_each_near, tolerance=1e-5)

pytestmark = pytest.mark.usefixtures("registered")


def qwen3(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def step(model: nn.Module, rows: int = 1, static: bool = False, padding: int = 0) -> tuple[Tensor, dict[str, int]]:
    """Decode one token behind ten; return the logits, and what was launched for it."""
    device, config = model.device, model.config
    ids = torch.arange(10 * rows).view(rows, 10).to(device) % 60
    cache = StaticCache(config, max_cache_len=16) if static else DynamicCache(config=config)
    mask = torch.ones(rows, 11, dtype=torch.long)
    mask[0, :padding] = 0
    with torch.no_grad():
        given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        masks = [{"attention_mask": m.to(device)} if padding else {} for m in (mask[:, :10], mask)]
        places = torch.full((rows, 1), 10, device=device)
        model(ids, **given, **masks[0])
        npu_counts.reset()
        logits = model(ids[:, :1], position_ids=places, **given, **masks[1]).logits
        counted = npu_counts.read()
    return logits.cpu(), counted


@pytest.mark.parametrize(("rows", "padding", "static", "most"), [
    (1, 0, False, 560), (2, 4, True, 680),
])  # fmt: skip
def test_a_decoding_step_fuses_sums_with_norms_in_every_layer(rows: int, padding: int, static: bool, most: int) -> None:
    model = kernels_ext_npu.kernelize(qwen3(LAYERS).to(torch.bfloat16).to("npu"))
    _, counted = step(model, rows, static, padding)
    waits = counted.pop("stream_syncs") + counted.pop("device_to_host_copies")
    assert sum(counted.values()) <= most, counted
    assert counted[LAUNCH] == 2 * LAYERS - 1
    assert counted["npu_mrope"] == LAYERS
    assert waits == 0
    assert counted.get("clone", 0) <= bool(padding)  # of the padding, and none of keys and values for each head
    assert counted.get("logical_not", 0) <= 1  # of masks


@pytest.mark.parametrize("name", ["qwen3", "llama", "mixtral", "qwen2", "gpt_oss", "gemma3_text", "olmo2", "granite"])
def test_logits_are_those_on_the_cpu(name: str) -> None:
    model = zoo.build(name).eval()
    expected, _ = step(model)
    ours = kernels_ext_npu.kernelize(model.to("npu"))
    found, counted = step(ours)
    assert_equal(found, expected)
    layers = ours.config.get_text_config().num_hidden_layers
    fused = {"gemma3_text": 0, "olmo2": 0, "granite": 0}.get(name, 2 * layers - 1)  # norms before sums, and factors
    assert counted.get(LAUNCH, 0) == fused


def test_a_norm_that_is_fused_with_a_sum_is_reported_and_restored() -> None:
    model = kernels_ext_npu.kernelize(qwen3().to("npu"))
    assert "fused add and norm during decoding" in " ".join(str(kernels_ext_npu.report(model)).split())
    expected, counted = step(model)
    assert counted[LAUNCH] == 5
    kernels_ext_npu.restore(model)
    assert "fused add and norm" not in str(kernels_ext_npu.report(model))
    found, counted = step(model)
    assert LAUNCH not in counted
    assert_equal(found, expected)
    kernels_ext_npu.kernelize(model)
    kernels_ext_npu.unregister()
    assert Qwen3DecoderLayer.forward is OWN
    assert LAUNCH not in step(model)[1]


def through_data(output: Any) -> None:
    """Write to what a module gives, or is given, so that no version tells."""
    (output[0] if isinstance(output, tuple) else output).data.add_(1.5)


def hook_behind(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: through_data(output))


def hook_before(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda module, args: through_data(args))


def hook_of_a_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: through_data(output))


def hook_of_all_modules(model: Any) -> Any:
    first = model.model.layers[0]
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, output: through_data(output) if module is first else None
    )


def wrapper(model: Any) -> None:
    first = model.model.layers[0]
    inner = first.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        through_data(output := inner(*args, **kwargs))
        return output

    first.forward = forward


@pytest.mark.parametrize("change", [hook_behind, hook_before, hook_of_a_norm, hook_of_all_modules, wrapper])
def test_what_is_written_between_two_layers_without_a_version_is_seen(change: Callable[[Any], Any]) -> None:
    found = []
    ours = kernels_ext_npu.kernelize(qwen3().to("npu"))
    for model in (qwen3(), ours):
        handle = change(model)
        found.append(step(model)[0])
        if handle is not None:
            handle.remove()
    assert_equal(found[1], found[0])


def scaled(cls: Any) -> Callable:
    forward = cls.forward

    @functools.wraps(forward)
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * torch.linspace(0.5, 2, 64, device=args[0].device)

    return changed


@pytest.mark.parametrize("cls", [Qwen3RMSNorm, Qwen3DecoderLayer])
def test_norms_use_a_forward_that_their_class_gets_later(monkeypatch, cls: Any) -> None:
    model, ours = qwen3(), kernels_ext_npu.kernelize(qwen3().to("npu"))
    unchanged, counted = step(ours)
    assert counted[LAUNCH] == 5
    monkeypatch.setattr(cls, "forward", scaled(cls))
    for look in (lambda model: model, kernels_ext_npu.kernelize, lambda model: model.eval()):
        expected, (found, counted) = step(model)[0], step(look(ours))
        assert_equal(found, expected)
        assert (found - unchanged).abs().max() > 0.1
        # no norm of a class that computes another one; of layers the sum in each at most, and nothing ahead
        assert counted.get(LAUNCH, 0) <= (0 if cls is Qwen3RMSNorm else 3)
    monkeypatch.undo()
    found, counted = step(kernels_ext_npu.kernelize(ours))
    assert_equal(found, unchanged)
    assert counted[LAUNCH] == 5
