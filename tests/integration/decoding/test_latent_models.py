"""Latent and sparse attention in whole generations: in graphs, assisted, with padding, in continuous batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.swaps.attention import mla_absorb
from tests.support import npu_counts
from tests.support.sparse_models import MODELS, made

pytestmark = pytest.mark.usefixtures("registered")
LATENT = ["deepseek_v3", "kimi_linear"]
NEW = 9
OPTIONS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
GRAPHS = {"cache_implementation": "static", "compile_config": CompileConfig(backend="NPUGraph")}


def both(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return made(name, index_n_heads=16)  # so many that no two scores are equal


def prompts() -> dict[str, Tensor]:
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    inputs = {key: value.to(model.device) for key, value in prompts().items()}
    return model.generate(**inputs, **OPTIONS, **options).tolist()


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    """Which way each attention took that was computed on latents."""
    taken: list[str] = []
    for name in ("attend", "attend_chosen"):
        method = getattr(mla_absorb.Latents, name)

        def noted(self, *args: Any, name: str = name, method: Any = method) -> Tensor:
            taken.append(name)
            return method(self, *args)

        monkeypatch.setattr(mla_absorb.Latents, name, noted)
    return taken


@pytest.mark.parametrize("name", [*LATENT, *MODELS])
def test_tokens_in_graphs_are_those_of_the_model_itself(steps, name: str) -> None:
    """Each token behind the second is one replay, and latents are what it attends to."""
    model, ours = both(name)
    expected = generated(model)
    assert generated(ours) == expected
    steps.clear()
    npu_counts.reset()
    assert generated(ours, **GRAPHS) == expected
    assert npu_counts.read()["graph_replays"] == NEW - 2
    assert set(steps) == {"attend" if name in LATENT else "attend_chosen"}


def test_operators_of_sparse_attention_are_in_the_graph() -> None:
    """In bfloat16, of the sizes that they take: tokens of a static cache with padding are those without graphs."""
    sizes = {"index_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = made("DeepseekV32ForCausalLM", index_n_heads=16, **sizes)[0].bfloat16()
    ours = kernels_ext_npu.kernelize(model.to("npu"))
    ours.set_attn_implementation("sdpa")
    expected = generated(ours, cache_implementation="static")
    npu_counts.reset()
    assert generated(ours, **GRAPHS) == expected
    launched = npu_counts.read(in_graphs=True)
    for operator, times in (("npu_lightning_indexer", 2), ("npu_sparse_flash_attention", 1)):  # in place, and of copies
        assert launched[operator] == times * (NEW - 2) * ours.config.num_hidden_layers


def test_latents_are_read_in_the_graph_as_the_static_cache_holds_them() -> None:
    """In bfloat16, of the sizes that the operator takes, with padding and with room for more tokens."""
    model = made("DeepseekV3ForCausalLM", kv_lora_rank=512, qk_rope_head_dim=64)[0].bfloat16()
    ours = kernels_ext_npu.kernelize(model.to("npu"))
    ours.set_attn_implementation("sdpa")
    expected = generated(ours, cache_implementation="static")
    npu_counts.reset()
    assert generated(ours, **GRAPHS) == expected
    launched = npu_counts.read(in_graphs=True)
    assert launched["npu_fused_infer_attention_score"] == (NEW - 2) * ours.config.num_hidden_layers
    assert not launched.keys() & {"npu_fusion_attention", "npu_fusion_attention_v3"}


@pytest.mark.parametrize("name", ["deepseek_v3", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"])
def test_several_tokens_of_an_assistant_are_those_of_the_model_itself(steps, name: str) -> None:
    model, ours = both(name)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    expected = model.generate(ids, **OPTIONS).tolist()
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": ours}):
        steps.clear()
        assert ours.generate(ids.npu(), **OPTIONS, **options).tolist() == expected
        assert steps


def test_continuous_batches_of_latent_attention_are_refused_as_long_as_transformers_fails() -> None:
    model, ours = both("deepseek_v3")
    settings = {"generation_config": GenerationConfig(max_new_tokens=2, eos_token_id=-1, pad_token_id=0)}
    settings["continuous_batching_config"] = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=48)
    with pytest.raises(ValueError, match=r"for heads of 8 numbers, .* has keys of 24 and values of 16\. Use generate"):
        ours.generate_batch([[4, 5, 6]], progress_bar=False, **settings)
    _, sparse = both("DeepseekV32ForCausalLM")
    with pytest.raises(ValueError, match=r"pages of deepseek_v32 .* and values of 16"):
        sparse.generate_batch([[4, 5, 6]], progress_bar=False, **settings)
    kernels_ext_npu.unregister()
    model.set_attn_implementation("sdpa")
    (outputs,) = model.generate_batch([[4, 5, 6]], progress_bar=False, **settings).values()
    assert "same slice shapes" in outputs.error
