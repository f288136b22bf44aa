"""Train a model with TRL's GRPOTrainer, towards completions with many different words.

`prompts.jsonl` has lines like {"prompt": "..."}.
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

import kernels_ext_npu


def variety(completions, **_):
    """Reward the share of words that are not repeated."""
    return [len(set(words)) / max(len(words), 1) for words in (completion.split() for completion in completions)]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=variety,
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
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
)
kernels_ext_npu.kernelize(trainer.model)
print(kernels_ext_npu.report(trainer.model))

trainer.train()
trainer.save_model()
