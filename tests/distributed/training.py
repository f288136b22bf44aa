"""Three steps of a Trainer, as tests/distributed/test_trainer.py has launchers start them."""

import json
import sys
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed

import kernels_ext_npu
import softnpu
from tests.support import zoo

BATCH, STEPS = 4, 3


def train(name: str, folder: str, **options: Any) -> dict[str, Any]:
    """Losses, norms of gradients, and what was swapped. Every batch has all its rows, however many processes there are.

    Two gradients with half of a batch each are accumulated in every step.
    """
    set_seed(0)
    model = zoo.build(name)
    rows = [[2 + (7 * i + j * j) % 80 for j in range(8)] for i in range(2 * BATCH * STEPS)]
    options = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2} | options
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        optim="adamw_torch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [float(entry["grad_norm"]) for entry in logged],
        "wrapped": type(trainer.model_wrapped).__name__,
        "norm_launches": softnpu.counters().get("npu_rms_norm", 0),
        "kept": [row.path for row in kernels_ext_npu.report(model) if not row.swapped],
        "is_main": trainer.is_world_process_zero(),
    }


def main() -> None:
    """The arguments are the model and, as JSON, options of the Trainer."""
    name, options = sys.argv[1:]
    kernels_ext_npu.register(everywhere=True)
    found = train(name, "output", **json.loads(options))
    if found.pop("is_main"):
        print(f"found: {json.dumps(found)}")
