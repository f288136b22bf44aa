"""Every model of transformers with a head that can be built small: its loss and all gradients, tied and untied."""

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kernels_ext_npu
from tests.integration.swaps.loss.heads import assert_same_step, head_row, labelled, pair
from tests.support import zoo

MHA: dict[str, Any] = {"num_key_value_heads": 4}
GPT_NEO: dict[str, Any] = {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]}
# what these need beside the sizes of the zoo
MORE: dict[str, dict[str, Any]] = dict.fromkeys(
    ("axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), MHA
) | {"codegen": {"rotary_dim": 8}, "gpt_neo": GPT_NEO, "zaya": {"num_experts_per_tok": 1}}
# models that call their head in another forward than the one that gets labels, or are given no labels by that name
KEPT = {
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "ernie", "megatron-bert", "prophetnet",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
# what needs more than random words and labels at the sizes of the zoo: layers of its own types, another cache, images,
# codebooks, a language, a model that it continues
UNBUILT = {
    "bailing_hybrid", "blt", "cohere_compass_text", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "git",
    "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer", "xlstm", "xmod",
    "zamba",
}  # fmt: skip


def build(name: str, tied: bool) -> PreTrainedModel:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    cls = getattr(transformers, named if isinstance(named, str) else named[0])
    known = {each.model_class: each for each in zoo.ARCHITECTURES.values()}.get(cls.__name__)
    config = zoo.configure(cls.config_class, MORE.get(name) or (known.config if known else {}), zoo.SMALL)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cls._from_config(config, dtype=torch.float32)
        zoo.randomise(model, 0)
    return model.to("npu").eval()


# models that are more than a decoder; of these the first compute more of their logits than the kernel knows
LOOKED_AT = {"qwen2_audio"}
OTHERWISE = {"albert", "bert", "deberta-v2", "nomic_bert", "roberta", "t5gemma"}
WITHOUT = {"distilbert", "hubert", "wav2vec2"}
# tied and untied heads, a softcap, scales, tanh, biases, a model with pictures, one inside another
QUICK = {"qwen3", "gemma2", "cohere", "granite", "nanochat", "gptj", "qwen2_vl", "bart"}


def more_than_decoders() -> list[str]:
    """Name the models of the zoo that have a head and are no causal language models."""
    named = {name: getattr(transformers, each.model_class) for name, each in zoo.ARCHITECTURES.items()}
    listed = [[names] if isinstance(names, str) else names for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    causal = set(itertools.chain(*listed))
    return [
        name
        for name, cls in named.items()
        if "labels" in inspect.signature(cls.forward).parameters and name not in WITHOUT and cls.__name__ not in causal
    ]


def marked(names: list[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", marked(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - UNBUILT)))
def test_a_causal_language_model(name: str, tied: bool) -> None:
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    model = build(name, tied)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model))
    assert_same_step(ours, model, labelled({"input_ids": ids}), name not in KEPT, rtol=2**-17)


@pytest.mark.parametrize("name", marked(more_than_decoders()))
def test_a_model_that_is_more_than_a_decoder(name: str) -> None:
    ours, model = pair(name)
    given = labelled(zoo.inputs(name, model))
    ours(**given)  # which shows what it does with its logits
    row = head_row(ours)
    assert row.swapped == (name not in OTHERWISE)
    assert (row.reason is not None) == (name in LOOKED_AT or not row.swapped)
    assert_same_step(ours, model, given, name not in LOOKED_AT | OTHERWISE, rtol=2**-17)
