"""The benchmark file runs as `kernels benchmark ./CrossEntropy` runs it, and agrees with transformers' lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "CrossEntropy"
WORKLOADS = {"head", "training", "logits"}
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


@pytest.fixture(autouse=True)
def _smaller(monkeypatch) -> None:
    """The host is slower than what it stands for."""
    for name, size in {"TOKENS": 32, "HIDDEN_SIZE": 16, "WORDS": 200}.items():
        monkeypatch.setitem(CLASS.setup_head.__globals__, name, size)


def test_every_workload_agrees_with_transformers_lines() -> None:
    results = run(CLASS)
    assert results.keys() >= WORKLOADS
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        benchmark_head = benchmark_training = None

        def benchmark_logits(self) -> None:
            super().benchmark_logits()
            self.out = self.out + 0.02

    with pytest.raises(RuntimeError, match="Verification failed for logits"):
        run(Wrong)
