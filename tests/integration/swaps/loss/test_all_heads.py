"""Every causal language model of transformers that can be built small: its loss and all gradients, tied and untied."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.support import zoo

pytestmark = pytest.mark.long

MHA: dict[str, Any] = {"num_key_value_heads": 4}
GPT_NEO: dict[str, Any] = {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]}
# what these need beside the sizes of the zoo
MORE: dict[str, dict[str, Any]] = dict.fromkeys(
    ("axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), MHA
) | {"codegen": {"rotary_dim": 8}, "gpt_neo": GPT_NEO, "zaya": {"num_experts_per_tok": 1}}
# models that call their head in another forward than the one that gets labels, or are given no labels by that name
KEPT = {
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "ernie",
    "megatron-bert",
    "prophetnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
}
# what cannot be called with random words and labels alone at the sizes of the zoo
UNBUILT = {
    "bailing_hybrid": "its layers take the lengths of a cache of another kind",
    "blt": "it has patches of bytes",
    "cohere_compass_text": "its types of layers",
    "gemma3n": "its tower for images needs timm",
    "gemma4_assistant": "it continues another model",
    "gemma4_unified_assistant": "it continues another model",
    "git": "it needs an image",
    "musicgen": "it has several codebooks",
    "musicgen_melody": "it has several codebooks",
    "qwen4_exp": "its types of layers",
    "qwen4_exp_text": "its types of layers",
    "recurrent_gemma": "it cannot be copied",
    "reformer": "the sizes of its positions",
    "xlstm": "the sizes of its heads",
    "xmod": "it needs a language",
    "zamba": "its types of layers",
}


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


def batch() -> dict[str, Tensor]:
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0)).npu()
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - UNBUILT.keys()))
def test_loss_and_gradients_are_those_without_the_kernel(name: str, tied: bool) -> None:
    """The loss to 2^-17, gradients to 2^-17 of the largest of the model: sums of float32 in another order.

    Logits are looked at when the weights that they were computed with are gone.
    """
    kernels_ext_npu.register(kernels=["CrossEntropy"])
    model = build(name, tied)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model))
    torch.manual_seed(1)
    expected = model(**batch())
    torch.manual_seed(1)
    found = ours(**batch())
    assert (isinstance(found.logits, DeferredLogits) and found.logits.known is None) == (name not in KEPT)
    found.loss.backward()
    expected.loss.backward()
    for parameter in ours.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-17, atol=0)
    assert torch.equal(found.logits, expected.logits)
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    for path, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (gradients[path] is None), path
        if parameter.grad is not None:
            assert float((parameter.grad - gradients[path]).abs().max()) <= 2**-17 * largest, path
