"""Train adapters of peft with transformers' Trainer.

`train.jsonl` has lines like {"text": "..."}.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3", data="train.jsonl", needs="datasets peft")
MODEL, DATA = given.model, given.data

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import kernels_ext_npu

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16")
adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
model = get_peft_model(model, adapters)
data = load_dataset("json", data_files=DATA, split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=1024), remove_columns=data.column_names)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "output",
        bf16=True,
        gradient_checkpointing=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        learning_rate=1e-3,
        logging_steps=1,
    ),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
kernels_ext_npu.kernelize(trainer.model)
print(kernels_ext_npu.report(trainer.model))

trainer.train()
trainer.save_model("adapters")
