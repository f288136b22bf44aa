"""Whole models with kernels: every architecture of the zoo still gives what the CPU gives without them."""

import pytest

import kernels_ext_npu
from tests.support import zoo
from tests.support.agreement import assert_agrees

# each line of the kernels and of the integration that these run, and each reason that they report, others have, too
LATE = {
    "albert", "apertus", "arcee", "bamba", "bart", "beit", "clip", "cohere2", "deberta-v2", "diffllama", "dinov2",
    "distilbert", "doge-moe", "electra", "ernie4_5", "eurobert", "exaone4", "falcon", "falcon-grouped",
    "falcon_mamba", "gemma", "gemma3_text", "glm", "glm4_moe", "glm4v_moe", "gpt2", "gpt_neox", "granite",
    "granitemoehybrid", "hunyuan_v1_dense", "idefics2", "idefics3", "internvl", "jetmoe", "lfm2", "lfm2_vl",
    "llava", "llava_next", "llava_onevision", "marian", "mbart", "mimo_v2_flash", "ministral", "mistral",
    "mistral3", "mixtral", "moonshine", "mpt", "nemotron", "nomic_bert", "olmo2", "olmo_hybrid", "olmoe", "opt",
    "pegasus", "persimmon", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_audio", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "roberta", "rwkv", "siglip",
    "smollm3", "stablelm", "starcoder2", "t5", "vit", "voxtral", "wav2vec2",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LATE)) for name in zoo.ARCHITECTURES]
)
# padded caches of hybrids
@pytest.mark.filterwarnings("ignore:npu_fusion_attention_v3. atten_mask leaves a row nothing")
def test_logits_gradients_and_tokens_are_the_originals(registered, name: str) -> None:
    model = kernels_ext_npu.kernelize(zoo.build(name).to("npu"))
    rows = list(kernels_ext_npu.report(model))
    assert not [row for row in rows if not (row.swapped or row.reason)]
    assert [row for row in rows if row.swapped]
    assert_agrees(name, model)
    assert not [row for row in kernels_ext_npu.report(kernels_ext_npu.restore(model)) if row.swapped]
