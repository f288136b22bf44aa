"""Latent attention of few queries, on what the cache holds: results, when it is, and who gets keys all the same."""

from __future__ import annotations

import copy
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kernels_ext_npu
from kernels_ext_npu.swaps.attention import mla_absorb
from tests.integration.swaps.attention.decoding_steps import KEYS, assert_same_steps, steps
from tests.support import npu_counts
from tests.support.counted import counted
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
def test_hooks_weights_and_a_restore_of_the_projection_take_effect(on_latents, how: str) -> None:
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
    """Two products with the weight, by groups, which copy none of it; it goes to no product with the cache."""
    _, ours = made("deepseek_v3")
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(torch.full((2, 9), 5).npu(), past_key_values=cache, use_cache=True)
        npu_counts.reset()
        ours(torch.full((2, 1), 5).npu(), past_key_values=cache, use_cache=True)
    experts = sum(hasattr(module, "experts") for module in ours.modules())
    assert npu_counts.read()["npu_grouped_matmul"] == 2 * ours.config.num_hidden_layers + 2 * experts
    assert "bmm" not in npu_counts.read()


@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_step_reads_latents_as_the_cache_holds_them(name: str) -> None:
    """In 16 bits and the sizes that the operator takes: behind 599 keys, which it does not expand.

    The attention of the model itself, in bfloat16 on the CPU, rounds as often, and expands them.
    """
    model, ours = made(name, kv_lora_rank=512, qk_rope_head_dim=64)
    model_outputs = (model.double(), ours.bfloat16(), copy.deepcopy(model).bfloat16())
    for each in model_outputs:
        each.load_state_dict({key: weight.bfloat16() for key, weight in model.state_dict().items()})
    x = torch.randn(2, 600, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for each in model_outputs:
        tokens, places = x.to(each.device, each.dtype), torch.arange(600, device=each.device).unsqueeze(0)
        tables, cache = each.model.rotary_emb(tokens, places), DynamicCache(config=each.config)
        with torch.no_grad():
            for few in (slice(0, 599), slice(599, 600)):
                npu_counts.reset()
                table = tables[:, few] if isinstance(tables, torch.Tensor) else [t[:, few] for t in tables]
                attention = each.model.layers[0].self_attn
                out = attention(tokens[:, few], position_embeddings=table, attention_mask=None, past_key_values=cache)[
                    0
                ]
        if each is ours:
            assert npu_counts.read()["npu_fused_infer_attention_score"] == 1
        found.append(out.cpu().double())
    expected, by_ours, by_itself = found
    # most of both is rounded before, in projections; what is rounded elsewhere differs by chance
    assert (by_ours - expected).norm() <= 1.25 * (by_itself - expected).norm()


@counted
def test_every_class_that_expands_latents_is_known() -> None:
    files = Path(transformers.__path__[0]).glob("models/*/modeling_*.py")
    files = [path for path in files if _METHOD in path.read_text()]
    modules = [import_module(f"transformers.models.{path.parent.name}.{path.stem}") for path in files]
    classes = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    expanding = {cls.__name__: cls for cls in classes if "expand_kv" in vars(cls)}
    assert len(expanding) == 18
    assert all(mla_absorb.replacement_for(cls, cls.expand_kv) is not None for cls in expanding.values())
    assert all("self.expand_kv(" in inspect.getsource(cls.forward) for cls in expanding.values())
