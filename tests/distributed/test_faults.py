"""A process that dies or hangs ends the others, within the timeout and with a message, and nothing is left of them."""

import datetime
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

import kernels_ext_npu
from tests.distributed import models
from tests.distributed.launching import TORCHRUN, launch
from tests.distributed.processes import FailedOnRanksError, Processes

pytestmark = pytest.mark.distributed

TIMEOUT = 6  # under torchrun the first collective waits for who imports more slowly
SHORT = 2  # for processes that are there
# of two messages on their way between two processes the first takes their connection down, and the other says so
TIMED_OUT = f"Timed out waiting {SHORT}000ms|Application timeout caused pair closure"

TRAINING = f"""
import softnpu
import os, signal, datetime
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["LOCAL_RANK"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the others at once
torch.npu.set_device(rank)
dist.init_process_group("hccl", timeout=datetime.timedelta(seconds={TIMEOUT}))
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).npu()
optimizer = torch.optim.AdamW(fully_shard(model).parameters())
try:
    for step in range(1000):
        if step == 2 and rank == 1:
            os.write(1, b"rank 1: two steps are done\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 8, device="npu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
except RuntimeError as error:
    os.write(1, f"rank {{rank}} ended: {{error}}\\n".encode())
    raise
"""


def test_what_is_killed_under_torchrun_ends_the_others_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING)
    command = (TORCHRUN, "--standalone", "--nproc-per-node", "2", "script.py")
    run = launch(*command, directory=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.code
    assert "rank 1: two steps are done" in run.output
    assert "Signal 9 (SIGKILL) received" in run.output, run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("rank 0 ended")]
    assert "by peer" in line  # the end of a process is seen by its connections, without waiting for the timeout
    assert run.left == []


def train_on_parts(how: str, place: str, folder: Path) -> None:
    """Train on parts of sequences; in the second step rank 1 is gone, and the others raise what they are told.

    It ends or hangs in front of the second layer, or behind it on the way back, as ``place`` says.
    """
    device = torch.device("npu", dist.get_rank())
    mesh = DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=SHORT)), "npu")
    kernels_ext_npu.register(everywhere=True)
    model = models.load(folder, device_map=device)
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            layer = model.model.layers[1]
            hook = layer.register_forward_pre_hook if place == "forward" else layer.register_full_backward_pre_hook
            hook(lambda *_: os._exit(7) if how == "exit" else time.sleep(1000))
        ids = models.tokens(step).to(device)
        positions = torch.arange(models.LENGTH, device=device).repeat(models.ROWS, 1)
        try:
            with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
                given = {"position_ids": positions, "labels": ids, "shift_labels": ids, "num_items_in_batch": 32}
                model(ids, **given, use_cache=False).loss.backward()
        except RuntimeError as error:
            raise RuntimeError(f"step {step}: {error}") from error


@pytest.mark.parametrize(
    ("how", "place", "others"),
    [("exit", "forward", f"by peer|{TIMED_OUT}"), ("hang", "backward", TIMED_OUT)],
)
def test_all_that_share_sequences_with_a_process_that_is_gone_end_with_a_message(
    how: str, place: str, others: str, four_ranks: Processes, checkpoints
) -> None:
    """It says in which step, and its traceback in which message of which layer.

    Of four two exchange heads, and one of each two gathers keys: not all have to do with the one that is gone.
    """
    with pytest.raises(FailedOnRanksError) as failed:
        four_ranks.run(train_on_parts, how, place, checkpoints("Qwen3"))
    reports = re.split(r"^rank \d: ", str(failed.value), flags=re.MULTILINE)[1:]
    assert reports.pop(1).strip() == ("its process ended" if how == "exit" else "not done in time")
    for report in reports:
        assert re.search(f"RuntimeError: step 1: .*({others})", report), report
        assert "collectives.py" in report
