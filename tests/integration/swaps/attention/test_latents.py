"""Latent attention of few queries, on what the cache holds: results, when it is, and who gets keys all the same."""

from __future__ import annotations

import copy
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kernels_ext_npu
import softnpu
from kernels_ext_npu.swaps.attention import latents
from tests.support.counted import counted
from tests.support.decoding_steps import KEYS, assert_same_steps, steps
from tests.support.nearness import assert_near
from tests.support.sparse_models import made

pytestmark = pytest.mark.usefixtures("registered")
# of the 16 those whose language models are made of small sizes alone; those with indexers: test_sparse_attention.py
MODELS = [
    *("deepseek_v2", "deepseek_v3", "kimi_linear", "longcat_flash", "AXK1ForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("MiniCPM3ForCausalLM", "Mistral4ForCausalLM", "YoutuForCausalLM"),
]
_METHOD = "def expand_kv("


@pytest.mark.parametrize("name", MODELS)
def test_tokens_behind_a_cache_are_those_of_the_model_itself(on_latents, name: str) -> None:
    model, ours = made(name)
    assert_same_steps(model, ours)
    assert set(on_latents) == {1, 3}


def test_tokens_that_see_fewer_keys_than_are_chosen_are_computed_on_latents(on_latents) -> None:
    model, ours = made("deepseek_v32")
    for each in (*model.modules(), *ours.modules()):
        if hasattr(each, "index_topk"):
            each.index_topk = 2 * KEYS
    assert_same_steps(model, ours)
    assert set(on_latents) == {1, 3}


def test_few_queries_are_no_further_from_float64_than_many(on_latents) -> None:
    """In bfloat16, over 1,000 results."""
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = DeepseekV3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, **sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    exact = DeepseekV3Attention(config, 0).double().requires_grad_(False)
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, 1 if parameter.dim() == 1 else 0, 0.3)
    exact.load_state_dict({name: value.bfloat16().double() for name, value in exact.state_dict().items()})
    ours = copy.deepcopy(exact).bfloat16().npu()
    ours.config = copy.deepcopy(config)
    ours.config._attn_implementation = "npu_flash_attention"
    kernels_ext_npu.kernelize(torch.nn.ModuleDict({"attention": ours}))
    x = torch.randn(4, 40, 64).bfloat16()
    turned = torch.randn(2, 1, 40, 8).bfloat16()
    seen = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, 40, 40, dtype=torch.float64).masked_fill(~seen, -torch.inf)

    def last(module, x: Tensor, tables: Tensor, mask: Tensor, split: int) -> Tensor:
        cache = DynamicCache()
        module(x[:, :split], tuple(tables[:, :, :split]), mask[..., :split, :split], past_key_values=cache)
        return module(x[:, split:], tuple(tables[:, :, split:]), mask[..., split:, :], past_key_values=cache)[0].cpu()

    wanted = last(exact, x.double(), turned.double(), added, 36)
    few = last(ours, x.npu(), turned.npu(), seen.npu(), 36)
    assert on_latents == [4]
    kernels_ext_npu.restore(torch.nn.ModuleDict({"attention": ours}))
    many = last(ours, x.npu(), turned.npu(), seen.npu(), 36)
    assert on_latents == [4]
    errors = [(found.double() - wanted).norm() for found in (few, many)]
    assert errors[0] <= errors[1] <= 0.1 * wanted.norm()


def test_many_queries_expand_and_so_does_who_looks_at_keys(on_latents) -> None:
    model, ours = made("deepseek_v3")
    ids = torch.randint(2, 90, (2, 9))
    with torch.no_grad():
        found, expected = ours(ids.npu(), output_attentions=True), model(ids, output_attentions=True)
        assert not on_latents
        cache = DynamicCache(config=ours.config)
        ours(ids.npu(), past_key_values=cache, use_cache=True)
    for weights, truth in zip(found.attentions, expected.attentions):
        assert_near(weights, truth)
    ours(ids[:, :1].npu(), past_key_values=cache).logits.sum().backward()  # the weight is trained
    assert not on_latents


@pytest.mark.parametrize("how", ["a hook", "restored", "other weights"])
def test_what_is_done_to_the_projection_counts(on_latents, how: str) -> None:
    """Weights that are loaded later are taken as they are: nothing is kept of them."""
    model, ours = made("deepseek_v3")
    called: list[int] = []
    layers = [module.kv_b_proj for module in ours.modules() if isinstance(module, DeepseekV3Attention)]
    if how == "a hook":
        for layer in layers:
            layer.register_forward_hook(lambda *_: called.append(1))
    elif how == "restored":
        kernels_ext_npu.restore(ours)
    else:
        steps(ours, DynamicCache(config=ours.config))
        weights = {n: w + 0.1 * w.sin() if "kv_b_proj" in n else w for n, w in model.state_dict().items()}
        model.load_state_dict(weights)
        ours.load_state_dict(weights)
    on_latents.clear()
    assert_same_steps(model, ours, [DynamicCache(), DynamicCache()])
    assert bool(on_latents) == (how == "other weights")
    assert bool(called) == (how == "a hook")


def test_a_step_moves_no_keys_of_heads() -> None:
    """Two products with the weight, and two sums side by side; the weight goes to no product with the cache."""
    _, ours = made("deepseek_v3")
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(torch.full((2, 9), 5).npu(), past_key_values=cache, use_cache=True)
        softnpu.reset_counters()
        ours(torch.full((2, 1), 5).npu(), past_key_values=cache, use_cache=True)
    assert softnpu.counters()["bmm"] == 2 * ours.config.num_hidden_layers


@counted
def test_every_class_that_expands_latents_is_known() -> None:
    files = Path(transformers.__path__[0]).glob("models/*/modeling_*.py")
    files = [path for path in files if _METHOD in path.read_text()]
    modules = [import_module(f"transformers.models.{path.parent.name}.{path.stem}") for path in files]
    classes = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    expanding = {cls.__name__: cls for cls in classes if "expand_kv" in vars(cls)}
    assert len(expanding) == 16
    assert all(latents.in_place_of(cls, cls.expand_kv) is not None for cls in expanding.values())
    assert all("self.expand_kv(" in inspect.getsource(cls.forward) for cls in expanding.values())
