"""Latent and sparse attention where ranks have heads of their own: transformers' tensor parallelism."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DistributedConfig

import kernels_ext_npu
from kernels_ext_npu.swaps.attention import mla_absorb
from tests.distributed import engines
from tests.support import zoo
from tests.support.sparse_models import made

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5  # float32: sums over ranks are in another order
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
PROMPTS = zoo.text(2, 9, torch.Generator().manual_seed(0))


def run(folder: Path) -> dict[str, Any]:
    """The tokens of a generation, the gradients of a prompt, and how many heads of latents each attention had."""
    heads: list[int] = []
    absorb = mla_absorb.Latents.absorb

    def noted(self, query: Tensor) -> tuple:
        heads.append(query.shape[1])
        return absorb(self, query)

    with engines.registered(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_absorb.Latents, "absorb", noted)
        patch.setattr(
            mla_absorb.Latents, "is_cheaper_for_chosen", lambda self, queries, count, _: count < self.nope.shape[2]
        )
        config = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True, distributed_config=config)
        inputs = {key: value.to(model.device) for key, value in PROMPTS.items()}
        tokens = model.generate(**inputs, **OPTIONS).tolist()
        of_tokens, heads[:] = set(heads), []
        logits = model(**inputs, use_cache=False).logits[1]
        (logits * torch.arange(100, device=model.device).sin()).sum().backward()
    return {
        "tokens": tokens,
        "heads": (of_tokens, set(heads)),
        "logits": logits.detach().cpu(),
        "gradients": engines.gradients(model),
    }


@pytest.mark.parametrize(
    ("name", "heads"),
    [("deepseek_v3", 4), ("deepseek_v2", 2), ("DeepseekV32ForCausalLM", 2), ("GlmMoeDsaForCausalLM", 2)],
)
def test_ranks_attend_to_latents_with_their_heads(two_ranks, tmp_path, name: str, heads: int) -> None:
    """DeepSeek-V3 has no plan for its attention: each rank has all heads. Training is on chosen keys alone."""
    model = zoo.build(name) if name in zoo.ARCHITECTURES else made(name, index_n_heads=16)[0]
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    expected = model.generate(**PROMPTS, **OPTIONS).tolist()
    logits = model(**PROMPTS, use_cache=False).logits[1]
    (logits * torch.arange(100).sin()).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    size = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for found in two_ranks.run(run, tmp_path):
        assert found["tokens"] == expected
        assert found["heads"] == ({heads}, set() if name.startswith("deepseek") else {heads})
        assert (found["logits"] - logits).norm() <= TOLERANCE * logits.norm()
        assert found["gradients"].keys() == gradients.keys()
        for each, gradient in gradients.items():
            assert (found["gradients"][each] - gradient).norm() <= TOLERANCE * size, each


def refusal(folder: Path) -> str:
    """What a forward says where indexers are to be trained."""
    with engines.registered(True):
        config = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True, distributed_config=config).train()
        kernels_ext_npu.train_indexer(model)
        with pytest.raises(RuntimeError) as raised:
            model(**{key: value.to(model.device) for key, value in PROMPTS.items()})
    return str(raised.value)


def test_indexers_are_not_trained_where_ranks_have_heads_of_their_own(two_ranks, tmp_path) -> None:
    made("DeepseekV32ForCausalLM", index_n_heads=16)[0].save_pretrained(tmp_path)
    assert all("tensor parallelism is not served" in said for said in two_ranks.run(refusal, tmp_path))
