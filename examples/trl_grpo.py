"""Train a model with TRL's GRPOTrainer, towards short completions.

`prompts.jsonl` has lines like {"prompt": "..."}.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3", data="prompts.jsonl", needs="datasets trl")
MODEL, DATA = given.model, given.data

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

import kernels_ext_npu


def brevity(completions, **_):
    """Reward what takes few characters."""
    return [-float(len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=brevity,
    args=GRPOConfig(
        "output",
        model_init_kwargs={"dtype": "float32"},
        bf16=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=64,
        num_train_epochs=1,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=load_dataset("json", data_files=DATA, split="train"),
)
kernels_ext_npu.kernelize(trainer.model)
print(kernels_ext_npu.report(trainer.model))

trainer.train()
trainer.save_model()
