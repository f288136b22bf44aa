"""Train adapters on a model in four bits, which is QLoRA, with TRL's SFTTrainer.

`chat.jsonl` has lines like
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3", data="chat.jsonl", needs="bitsandbytes datasets peft trl")
MODEL, DATA = given.model, given.data

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import kernels_ext_npu

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16", device_map="npu", quantization_config=four_bits)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        "output",
        bf16=True,
        max_length=1024,
        gradient_checkpointing=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        learning_rate=1e-3,
        logging_steps=1,
    ),
    train_dataset=load_dataset("json", data_files=DATA, split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
kernels_ext_npu.kernelize(trainer.model)
print(kernels_ext_npu.report(trainer.model))

trainer.train()
trainer.save_model("adapters")
