"""`kernels benchmark` of the real command line, under the software device."""

import shutil
import sys
from pathlib import Path

from build import ROOT

# the workloads of the real file that the host computes in no time
QUICK = """
for name in ("hidden_states", "query_heads", "training"):
    delattr(RMSNormBenchmark, f"benchmark_{name}")
"""


def test_a_path_is_verified_and_its_times_are_called_what_they_are(run_forked, tmp_path: Path) -> None:
    repository = tmp_path / "RMSNorm"
    shutil.copytree(ROOT / "RMSNorm", repository)
    script = repository / "benchmarks" / "benchmark.py"
    script.write_text(script.read_text() + QUICK)
    command = str(Path(sys.executable).with_name("kernels"))  # of the environment, which may not be on the path
    arguments = [command, "benchmark", str(repository), "--iterations", "2", "--warmup", "0"]
    result = run_forked(None, "-m", "softnpu", *arguments, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stderr.splitlines() if line.startswith("│ RMSNormBenchmark")]
    assert sorted(row.split()[3] for row in rows) == ["add", "decode"]
    assert all("✓" in row for row in rows)
    assert result.stderr.splitlines()[-1].startswith("softnpu: these are times of the host")
    assert result.stdout == ""
