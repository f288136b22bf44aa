"""Trainer on two processes, started by torchrun and by accelerate launch as a user starts them.

Losses and norms of gradients are those of a Trainer in one process on the CPU without kernels, with the same batches:
in float32 to 1e-5, since AdamW divides by a root of squares; in bfloat16 to 2^-6, a few of its steps.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments, set_seed

import kernels_ext_npu
import softnpu
from tests.distributed.launching import ROOT, TORCHRUN, launch
from tests.support import zoo

pytestmark = pytest.mark.distributed

BATCH, STEPS = 4, 3
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
SCRIPT = "import softnpu\nfrom tests.distributed.test_trainer import main\n\nmain()\n"
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_ip: 127.0.0.1
main_process_port: 0
"""
FSDP2 = """
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
CONTEXT_PARALLEL = """
parallelism_config:
  parallelism_config_cp_size: 2
"""
PLAIN: dict[str, Any] = {}
IN_BFLOAT16 = {"bf16": True}
WHOLE_BATCH = {"per_device_train_batch_size": BATCH}  # of which each process has a part of every row
CHECKPOINTING = {"gradient_checkpointing": True}
SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}


# ---- in the processes -----------------------------------------------------------------------------------------------
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


# ---- launched --------------------------------------------------------------------------------------------------------
DDP, BY_TORCHRUN = "DistributedDataParallel", None
BY_FSDP2 = CONFIG.format(kind="FSDP") + FSDP2
IN_SHORT = [
    ("qwen3_moe", BY_FSDP2, PLAIN, "FSDP"),
    ("gemma3_text", BY_FSDP2 + CONTEXT_PARALLEL, WHOLE_BATCH, "FSDP"),
]
LONG = [
    ("qwen3", CONFIG.format(kind="MULTI_NPU"), PLAIN, DDP),
    ("qwen3", BY_TORCHRUN, CHECKPOINTING, DDP),
    ("qwen3_moe", BY_TORCHRUN, PLAIN, DDP),
    ("qwen3", BY_TORCHRUN, SHARDED | CHECKPOINTING, "FSDP"),
    ("qwen3", BY_TORCHRUN, IN_BFLOAT16, DDP),  # autocast
    ("qwen3", BY_TORCHRUN, SHARDED | IN_BFLOAT16, "FSDP"),  # a policy of FSDP2
]


@pytest.mark.parametrize(
    ("name", "config", "options", "wrapped"), IN_SHORT + [pytest.param(*row, marks=pytest.mark.long) for row in LONG]
)
def test_trainer_trains_as_one_process_does(
    tmp_path: Path, name: str, config: str | None, options: dict[str, Any], wrapped: str
) -> None:
    """Started by accelerate launch with its file of a config, or else by torchrun."""
    launcher = [TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
        launcher = [ACCELERATE, "launch", "--config_file", "config.yaml"]
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = ":".join(str(ROOT / folder) for folder in ("", "integration", "tests"))
    given = json.dumps({"per_device_train_batch_size": BATCH // 2} | options)
    environment = {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    launched = launch(*launcher, "train.py", name, given, directory=tmp_path, **environment)
    assert launched.code == 0, launched.output
    assert not launched.left
    (line,) = [line for line in launched.output.splitlines() if line.startswith("found: ")]
    found = json.loads(line.removeprefix("found: "))
    expected = train(name, str(tmp_path / "expected"), use_cpu=True)
    tolerance = 2**-6 if "bf16" in options else 1e-5
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    assert found["wrapped"].startswith(wrapped)
    # a head that is not tied is a unit of FSDP by itself, and multiplies itself
    assert found["kept"] == (["lm_head"] if wrapped == "FSDP" else [])
    assert found["norm_launches"]
