"""sentence-transformers with the kernel by name: texts of many lengths are one row, without padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.products import flops
from tests.support import checkpoints, npu_counts
from tests.support.launches import ATTENTION
from tests.support.nearness import assert_each_near
from tests.support.zoo import randomise

pytestmark = pytest.mark.usefixtures("registered")
NAMES = ["npu_flash_attention", "kernels-ext-npu/FlashAttention"]
FLOAT32 = 1e-5  # of values of size one to four: both are float32, with sums in another order
assert_near = partial(assert_each_near, tolerance=FLOAT32)

_SIZES = {
    "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
_HEADS = {"num_key_value_heads": 1, "head_dim": 16}
MODELS: dict[str, tuple[dict[str, Any], str]] = {  # what else their configs say, and how tokens become an embedding
    "bert": ({}, "cls"),
    "xlm-roberta": ({}, "mean"),  # its positions begin behind that of padding
    "modernbert": ({"local_attention": 16, "global_attn_every_n_layers": 2}, "cls"),
    "gte": ({}, "cls"),
    "qwen3": (_HEADS, "lasttoken"),
    "gemma3_text": (_HEADS | {"use_bidirectional_attention": True, "sliding_window": 16}, "mean"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """Save a tiny model of a type, with a tokenizer that pads on the side that its family does."""

    def save(model_type: str, auto: Any = AutoModel, **options: Any) -> str:
        checkpoints.save(tmp_path, "qwen3")
        side = "left" if model_type == "qwen3" else "right"
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path, padding_side=side, model_max_length=64)
        tokenizer.chat_template = None
        model = auto.from_config(AutoConfig.for_model(model_type, **(_SIZES | MODELS[model_type][0] | options)))
        with torch.no_grad():
            randomise(model, 0)
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(checkpoints.WORDS, k=draw.randint(2, 60))) for _ in range(count)]


def modules(folder: str, mode: str, name: str, **others: Any) -> list[Any]:
    """Make what turns texts into tokens and these into an embedding."""
    transformer = Transformer(folder, model_kwargs={"attn_implementation": name}, **others)
    return [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)]


def embedder(folder: str, mode: str, name: str, device: str, **others: Any) -> SentenceTransformer:
    return SentenceTransformer(modules=modules(folder, mode, name, **others), device=device)


# ---- inference -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", MODELS)
def test_embeddings_of_a_row_without_padding_are_those_of_a_padded_batch(checkpoint, model_type, name) -> None:
    folder, mode = checkpoint(model_type), MODELS[model_type][1]
    expected = embedder(folder, mode, "eager", "cpu").encode(texts(9), convert_to_tensor=True)
    model = kernels_ext_npu.kernelize(embedder(folder, mode, name, "npu"))
    assert model.preprocess(texts(3))["input_ids"].shape == (1, sum(len(text.split()) for text in texts(3)))
    npu_counts.reset()
    assert_near(model.encode(texts(9), convert_to_tensor=True), expected)
    assert npu_counts.read()[ATTENTION] == 2  # one for each layer


def test_texts_of_a_row_do_not_see_each_other(checkpoint) -> None:
    model = embedder(checkpoint("bert"), "mean", NAMES[0], "npu")
    together = model.encode(texts(5), convert_to_tensor=True)
    alone = torch.stack([model.encode(text, convert_to_tensor=True) for text in texts(5)])
    assert_near(together, alone.cpu())


# ---- rerankers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model_type", ["xlm-roberta", "modernbert"])
def test_a_reranker_of_a_classification_model_keeps_its_padding(checkpoint, model_type) -> None:
    """Its head takes the first position of each row: sentence-transformers lays none of these flat."""
    folder = checkpoint(model_type, AutoModelForSequenceClassification, num_labels=1)
    pairs = list(zip(texts(7), texts(7, 1)))
    expected = CrossEncoder(folder, device="cpu", model_kwargs={"attn_implementation": "eager"}).predict(pairs)
    model = CrossEncoder(folder, device="npu", model_kwargs={"attn_implementation": NAMES[0]})
    assert len(model.preprocess(pairs)["input_ids"]) == 7
    npu_counts.reset()
    assert_near(torch.tensor(model.predict(pairs)), torch.tensor(expected))
    assert npu_counts.read()[ATTENTION] == 2


def test_a_reranker_of_pooling_and_a_dense_layer_has_no_padding(checkpoint) -> None:
    folder, pairs = checkpoint("modernbert"), list(zip(texts(7), texts(7, 1)))
    head = Dense(32, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    reranker = lambda name, device: CrossEncoder(modules=[*modules(folder, "cls", name), head], device=device)  # noqa: E731
    expected = torch.tensor(reranker("eager", "cpu").predict(pairs))
    model = reranker(NAMES[0], "npu")
    assert len(model.preprocess(pairs)["input_ids"]) == 1
    assert_near(torch.tensor(model.predict(pairs)), expected)


# ---- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make_loss",
    [MultipleNegativesRankingLoss, partial(CachedMultipleNegativesRankingLoss, mini_batch_size=2)],
    ids=["at once", "GradCache"],
)
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "qwen3"])
def test_gradients_of_a_ranking_loss_are_those_of_a_padded_batch(checkpoint, model_type, make_loss) -> None:
    folder, mode = checkpoint(model_type), MODELS[model_type][1]
    without_dropout = {"config_kwargs": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}
    others = without_dropout if model_type == "bert" else {}

    def step(name: str, device: str) -> tuple[Tensor, dict[str, Tensor]]:
        model = embedder(folder, mode, name, device, **others).train()
        columns = [model.preprocess(texts(5, seed)) for seed in (0, 1)]
        assert (len(columns[0]["input_ids"]) == 1) == (device == "npu")
        on_device = [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in each.items()} for each in columns]
        loss = make_loss(model)(on_device, None)
        loss.backward()
        return loss.detach(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}

    (expected, expected_grads), (loss, grads) = step("eager", "cpu"), step(NAMES[0], "npu")
    assert_near(loss, expected)
    assert expected_grads.keys() == grads.keys()
    assert len(grads) > 10
    largest = max(grad.abs().max() for grad in expected_grads.values())
    for key, grad in expected_grads.items():
        # cosines are multiplied by 20 in the loss, and float32 has 6e-8: the largest gradient is off by some 1e-6 of it
        torch.testing.assert_close(grads[key].cpu() / largest, grad / largest, atol=FLOAT32, rtol=0, msg=key)


# ---- what it saves ---------------------------------------------------------------------------------------------------
class _Products(Cost):
    """Counts the additions and multiplications of products, too."""

    flops = 0.0

    def count(self, operator: Any, args: tuple, kwargs: dict, result: Any) -> Any:
        self.flops += flops(operator, args, kwargs, result)
        return super().count(operator, args, kwargs, result)


def test_64_texts_of_16_to_512_tokens_cost_half_of_a_padded_batch(checkpoint) -> None:
    """Attention is the same launch in both; all else is computed of 16,865 tokens in place of 32,768."""
    lengths = torch.linspace(16, 512, 64).long().tolist()
    batch = [" ".join(random.Random(n).choices(checkpoints.WORDS, k=n)) for n in lengths]
    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 520}
    folder, counted, found = checkpoint("xlm-roberta", **sizes), {}, {}
    for unpad in (True, False):
        model = embedder(folder, "cls", NAMES[0], "npu", unpad_inputs=unpad).eval()
        model.tokenizer.model_max_length = 512
        inputs = {k: v.npu() if isinstance(v, Tensor) else v for k, v in model.preprocess(batch).items()}
        assert inputs["input_ids"].numel() == (sum(lengths) if unpad else 64 * 512)
        with torch.no_grad(), _Products() as counted[unpad]:
            found[unpad] = model(inputs)["sentence_embedding"]
    assert_near(found[True], found[False].cpu())
    assert counted[True].launches[ATTENTION] == counted[False].launches[ATTENTION] == 2
    assert sum(lengths) == 16_865  # as docs/recipes.md says
    share = sum(lengths) / (64 * 512)
    assert counted[True].flops <= 1.001 * share * counted[False].flops
    assert counted[True].bytes.total() <= share * counted[False].bytes.total()
    assert counted[True].launches.total() < counted[False].launches.total()
