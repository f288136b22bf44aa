"""What transformers promises of every model, held for models with kernels: each of these promises was broken once.

The truth is the same model without kernels on the CPU, in eager attention: transformers' sdpa takes masks that are
added to scores for boolean ones wherever torch_npu is. Where both sides have kernels, the promise itself is the truth.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests.support import zoo
from tests.support.attention_models import on_npu
from tests.support.served import kernelized

TOLERANCE = 2e-5  # of the largest value: float32, sums in another order through two layers
pytestmark = pytest.mark.usefixtures("registered")
DECODERS = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt_neox", "cohere", "phi3", "qwen3_moe")
TOKENS = 9
PADDED = {  # no row behind a token is without a key, though windows are of four
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 0, 0, 0],
    "both": [0, 0, 1, 1, 1, 1, 0, 0, 0],
}


@functools.cache
def plain_model(name: str) -> PreTrainedModel:
    model = zoo.build(name)
    model.set_attn_implementation("eager")
    return model


def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model twice: without kernels on the CPU, and with them on the NPU."""
    return plain_model(name), kernelized(name)


def assert_close(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(2, 90, (batch, tokens), generator=torch.Generator().manual_seed(0))


# ---- padding ---------------------------------------------------------------------------------------------------------
def assert_same_outputs(name: str, inputs: dict[str, Any], rows: Tensor | None = None) -> None:
    """Compare all that a model gives, or some rows of it."""
    plain, ours = pair(name)
    with torch.no_grad():
        expected, found = plain(**inputs), ours(**on_npu(inputs))
    for a, b in zip(zoo.tensors(found), zoo.tensors(expected), strict=True):
        assert_close(a if rows is None else a[rows.npu()], b if rows is None else b[rows])


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("name", DECODERS)
def test_every_row_that_sees_a_key_is_that_of_the_plain_model(name, side) -> None:
    """Padding leaves out keys: queries behind the last valid token still see those before them."""
    mask = torch.tensor([PADDED[side], [1] * TOKENS])
    inputs = {"input_ids": ids(2, TOKENS), "attention_mask": mask, "output_hidden_states": True}
    assert_same_outputs(name, inputs, mask.cumsum(-1) > 0)


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_every_row_of_an_encoder_is_that_of_the_plain_model(name) -> None:
    inputs = zoo.inputs(name, plain_model(name))
    assert_same_outputs(name, inputs | {"attention_mask": torch.tensor([PADDED["right"], [1] * TOKENS])})


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "gpt_neox"])
def test_generate_goes_on_from_prompts_that_are_padded_on_the_right(name) -> None:
    plain, ours = pair(name)
    inputs = {"input_ids": ids(2, TOKENS), "attention_mask": torch.tensor([PADDED["right"], [1] * TOKENS])}
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(**on_npu(inputs), **options).cpu(), plain.generate(**inputs, **options))


MASKS = PADDED | {"holes": [1, 0, 1, 1, 0, 1, 0, 1, 1]}


@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_a_decoder_with_a_cache_gives_what_it_gives_without(name, side) -> None:
    """In every row that sees a key."""
    plain, ours = pair(name)
    tokens, mask = ids(2, TOKENS), torch.tensor([MASKS[side], [1] * TOKENS])
    sees = mask.cumsum(-1) > 0
    encoder = {"encoder_hidden_states": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))}
    decoder = ours.get_decoder()
    with torch.no_grad():
        expected = plain.get_decoder()(tokens, attention_mask=mask, **encoder).last_hidden_state
        tokens, mask, encoder = tokens.npu(), mask.npu(), on_npu(encoder)
        whole = decoder(tokens, attention_mask=mask, **encoder).last_hidden_state
        start = decoder(tokens[:, :6], attention_mask=mask[:, :6], use_cache=True, **encoder)
        rest = decoder(tokens[:, 6:], attention_mask=mask, past_key_values=start.past_key_values, **encoder)
    parts = torch.cat([start.last_hidden_state, rest.last_hidden_state], 1)
    for found in (whole, parts):
        assert_close(found[sees.npu()], expected[sees])


def test_a_trainer_predicts_the_logits_of_padded_rows(tmp_path) -> None:
    plain, ours = pair("llama")
    mask = torch.tensor([PADDED["right"], [1] * TOKENS])
    inputs = {"input_ids": ids(2, TOKENS), "attention_mask": mask, "labels": ids(2, TOKENS)}
    rows = [{key: value[i] for key, value in inputs.items()} for i in range(2)]
    arguments = TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True, per_device_eval_batch_size=2)
    found = torch.from_numpy(Trainer(ours, arguments).predict(rows).predictions)
    with torch.no_grad():
        assert_close(found, plain(**inputs).logits)
