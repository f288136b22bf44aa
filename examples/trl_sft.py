"""Fine-tune a model on chats with TRL's SFTTrainer.

`chat.jsonl` has lines like
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3", data="chat.jsonl", needs="datasets trl")
MODEL, DATA = given.model, given.data

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import kernels_ext_npu

trainer = SFTTrainer(
    model=MODEL,
    args=SFTConfig(
        "output",
        model_init_kwargs={"dtype": "float32"},
        bf16=True,
        max_length=1024,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        learning_rate=1e-4,
        logging_steps=1,
    ),
    train_dataset=load_dataset("json", data_files=DATA, split="train"),
)
kernels_ext_npu.kernelize(trainer.model)
print(kernels_ext_npu.report(trainer.model))

trainer.train()
trainer.save_model()
