"""`kernels benchmark` of the real command line, under the software device: what it does and what it cannot."""

import shutil
import sys
from pathlib import Path

from build import ROOT

# the workloads of the real file that the host computes in no time
QUICK = """
for name in ("hidden_states", "query_heads", "training"):
    delattr(RMSNormBenchmark, f"benchmark_{name}")
"""


def kernels(run_forked, *arguments: str, **environment: str):
    command = str(Path(sys.executable).with_name("kernels"))  # of the environment, which may not be on the path
    options = ["--iterations", "2", "--warmup", "0"]
    return run_forked(None, "-m", "softnpu", command, "benchmark", *arguments, *options, check=False, **environment)


def test_a_path_is_verified_and_its_times_are_called_what_they_are(run_forked, tmp_path: Path) -> None:
    repository = tmp_path / "RMSNorm"
    shutil.copytree(ROOT / "RMSNorm", repository)
    script = repository / "benchmarks" / "benchmark.py"
    script.write_text(script.read_text() + QUICK)
    result = kernels(run_forked, str(repository))
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stderr.splitlines() if line.startswith("│ RMSNormBenchmark")]
    assert sorted(row.split()[3] for row in rows) == ["add", "decode"]
    assert all("✓" in row for row in rows)
    assert result.stderr.splitlines()[-1].startswith("softnpu: these are times of the host")
    assert result.stdout == ""


def test_a_published_one_is_out_of_its_reach(run_forked, localhub, client, tmp_path: Path) -> None:
    """kernels 0.17.2 asks for a model of that name, and loads without saying whom it trusts."""
    result = kernels(run_forked, "kernels-ext-npu/RMSNorm@v1", **localhub.environment(tmp_path / "home"))
    assert result.returncode != 0
    assert "/api/models/kernels-ext-npu/RMSNorm/revision/v1" in result.stderr
    assert [request.status for request in localhub.faults.requests if "/api/models/" in request.path] == [404]
