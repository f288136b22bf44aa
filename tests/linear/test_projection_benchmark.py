"""The benchmark file runs as `kernels benchmark ./Linear` runs it, and agrees with torch's and peft's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "Linear"
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


@pytest.fixture(autouse=True)
def _smaller(monkeypatch) -> None:
    """The host is slower than what it stands for."""
    for name, size in {"PROJECTED_ROWS": 64, "INPUTS": 32, "SIZES": (32, 8, 8)}.items():
        monkeypatch.setitem(CLASS.setup_projections.__globals__, name, size)


def test_every_workload_agrees_with_the_lines_of_others() -> None:
    results = run(CLASS)
    assert results.keys() >= {"projections", "adapters"}
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        benchmark_projections = None

        def benchmark_adapters(self) -> None:
            super().benchmark_adapters()
            self.out = self.out + 0.02

    with pytest.raises(RuntimeError, match="Verification failed for adapters"):
        run(Wrong)
