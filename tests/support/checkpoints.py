"""Make a checkpoint with a tokenizer, and data to train with; nothing of it is downloaded."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support import zoo

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant"]
WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def save(folder: Path, name: str) -> None:
    """Save a model of the zoo, with a tokenizer whose words are w0 to w59."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {kind: f"<{kind.removesuffix('_token')}>" for kind in ("pad_token", "bos_token", "eos_token", "unk_token")}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    wrapped.chat_template = TEMPLATE
    model = zoo.build(name)
    model.config.eos_token_id = model.generation_config.eos_token_id = wrapped.eos_token_id
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)


def write_data(folder: Path, rows: int = 8) -> None:
    """Write train.jsonl, chat.jsonl and prompts.jsonl, and the demo data of LLaMA-Factory."""
    lines = [" ".join(WORDS[(7 * i + j) % 60] for j in range(6 + i % 5)) for i in range(rows)]
    pairs = [(line[: len(line) // 2], line) for line in lines]
    write_lines(folder / "train.jsonl", [{"text": line} for line in lines])
    write_lines(folder / "prompts.jsonl", [{"prompt": q} for q, _ in pairs])
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    write_lines(folder / "chat.jsonl", [{"messages": chat} for chat in chats])
    (folder / "data").mkdir()
    demo = [{"instruction": q, "input": "", "output": a} for q, a in pairs]
    (folder / "data/demo.json").write_text(json.dumps(demo))
    (folder / "data/dataset_info.json").write_text(json.dumps({"alpaca_en_demo": {"file_name": "demo.json"}}))


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
