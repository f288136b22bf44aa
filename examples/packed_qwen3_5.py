"""Train adapters of Qwen3.5, most of whose layers have linear attention, on packed rows.

`train.jsonl` has lines like {"text": "..."}.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3.5-0.8B", tiny="Qwen3.5", data="train.jsonl", needs="datasets peft")
MODEL, DATA = given.model, given.data

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import kernels_ext_npu

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16")
projections = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"]
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=projections))
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
    data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
)
kernels_ext_npu.kernelize(trainer.model)
print(kernels_ext_npu.report(trainer.model))

trainer.train()
trainer.save_model("adapters")
