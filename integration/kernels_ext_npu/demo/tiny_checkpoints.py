"""Tiny checkpoints with random weights and a tokenizer, and a few lines to train them with; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from kernels_ext_npu import model_configs

_SPECIAL = ["<pad>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
# with these every place of a vocabulary of 128 has a name
_CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1))) + "ÄÖÜßàáâãäåæçèéêëìíîïðñòóôõö"
_PICTURE = {"eoi_token": "<eoi>", "boi_token": "<boi>", "image_token": "<image>"}
_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ '<boi>' if part['type'] == 'image' else part['text'] }}{% endfor %}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
_ANSWERS = {
    "Why is the sky blue?": "Air scatters blue light more than red light.",
    "What is a prime number?": "One that two numbers divide: 1 and itself.",
    "Who wrote Faust?": "Goethe, over some sixty years.",
    "How far is the moon?": "Some 384,000 kilometres.",
    "What is an octave?": "Twice a frequency, or half of it.",
    "Why do leaves fall?": "Trees keep their water in winter.",
    "What is a leap year?": "One of 366 days.",
    "How do bees speak?": "They dance.",
}
_CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in _ANSWERS.items()
]
# by the name of the file that a script reads
DATA: dict[str, list[dict[str, Any]]] = {
    "train.jsonl": [{"text": f"{question} {answer}"} for question, answer in _ANSWERS.items()],
    "chat.jsonl": _CHATS,
    "prompts.jsonl": [{"prompt": question} for question in list(_ANSWERS)[:2]],
}


def loader(config: Any) -> Any:
    """Return the auto class that loads a checkpoint and can generate; None for a model that generates no text."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping or auto.__name__ in getattr(config, "auto_map", {}):
            return auto
    return None


def random_model(config: Any) -> PreTrainedModel:
    """Return a model with random weights, always the same ones, whose norms and biases are its own.

    Ones and zeros would hide a kernel that ignores them.
    """
    torch.manual_seed(0)
    model = loader(config).from_config(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save(name: str, folder: Path) -> None:
    """Save a tiny model of ``model_configs`` with its tokenizer or, where it sees, with its processor.

    A token is a character: whatever random weights answer can be printed.
    """
    config = model_configs.config(name)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    places = {_PICTURE[kind]: getattr(config, f"{kind}_id") for kind in _PICTURE} if vision is not None else {}
    tokens = [*_SPECIAL, *_CHARACTERS]
    for token, place in places.items():
        tokens[place] = token
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *places],
        extra_special_tokens=_PICTURE if places else {},
        chat_template=_CHATML,
    )
    text.eos_token_id = wrapped.eos_token_id
    with torch.random.fork_rng(devices=[]):  # what a script draws is the same with a path
        random_model(config).save_pretrained(folder)
    if vision is None:
        wrapped.save_pretrained(folder)
        return
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor  # for which Pillow is needed

    pictures = Gemma3ImageProcessorPil(size={"height": vision.image_size, "width": vision.image_size})
    length = config.mm_tokens_per_image
    Gemma3Processor(pictures, wrapped, chat_template=_CHATML, image_seq_length=length).save_pretrained(folder)


def write_data(name: str, folder: Path) -> None:
    """Write a file of ``DATA`` into a folder."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in DATA[name]))
