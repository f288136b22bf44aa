"""torchrun, in the ways that a user starts it."""

import sys
from pathlib import Path

import pytest

from tests.distributed.launching import TORCHRUN, launch

pytestmark = pytest.mark.distributed

TWO = ("--standalone", "--nproc-per-node", "2")

BODY = """
import os, torch, torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
assert torch.npu.device_count() == 2  # as many as processes
torch.npu.set_device(rank)
"""

REDUCE = """
dist.init_process_group("hccl")
x = torch.full((3,), rank + 1.0, device="npu")
dist.all_reduce(x)
assert x.tolist() == [3, 3, 3] and x.device == torch.device("npu", rank)
os.write(1, f"rank {rank} is done\\n".encode())
dist.destroy_process_group()
"""

# Threads and sockets end with their groups, and a group of the same name in the same store begins anew.
AGAIN = """
def alive():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

counts = [alive()]
for round in range(6):
    dist.init_process_group("hccl")
    pair = dist.new_group([0, 1])
    for _ in range(round + 1):
        x = torch.ones(2 + round, device="npu")
        dist.all_reduce(x)
    dist.all_reduce(x, group=pair)
    assert x.tolist() == [4.0] * (2 + round)
    dist.destroy_process_group()
    del pair
    counts.append(alive())
assert counts[0] == counts[-1], counts
"""

# Without a backend torch takes the one of each device; with one it binds the group to it.
BOUND = """
dist.init_process_group(device_id=torch.device("npu", rank))
assert dist.get_default_backend_for_device("npu") == "hccl"
assert dist.get_backend() == "hccl", dist.get_backend()
x = torch.ones(2, device="npu")
dist.all_reduce(x)
alone = dist.new_group([0])
if rank == 0:
    dist.all_reduce(x, group=alone)
mesh = dist.init_device_mesh("npu", (2,), mesh_dim_names=("shard",))
dist.all_reduce(x, group=mesh.get_group())
assert x.tolist() == [4.0, 4.0]
try:
    dist.split_group(split_ranks=[[0], [1]])
except RuntimeError as error:
    assert "does not support splitting" in str(error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("import softnpu" + BODY + AGAIN + BOUND + REDUCE, (TORCHRUN, *TWO)),
        (BODY + REDUCE, (TORCHRUN, *TWO, "-m", "softnpu")),
        ("import softnpu" + BODY + REDUCE, (sys.executable, "-m", "softnpu", TORCHRUN, *TWO)),
    ],
    ids=["a script that imports softnpu first", "one that knows nothing of it", "softnpu in front of torchrun"],
)
def test_ranks_of_torchrun_reduce(tmp_path: Path, script: str, command: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(script)
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if command[0] == TORCHRUN else {}
    run = launch(*command, "script.py", directory=tmp_path, **environment)
    assert run.code == 0, run.output
    assert "rank 0 is done" in run.output
    assert "rank 1 is done" in run.output
    assert not run.left
