"""The benchmark file runs as `kernels benchmark ./SwiGLU` runs it, and each workload agrees with its reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "SwiGLU"
WORKLOADS = {"joined", "two_tensors", "geglu", "clipped", "decode", "training"}
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


def test_every_workload_agrees_with_transformers_lines(monkeypatch) -> None:
    monkeypatch.setitem(CLASS.setup_joined.__globals__, "TOKENS", 64)  # the host is slower than what it stands for
    results = run(CLASS)
    assert results.keys() >= WORKLOADS
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        benchmark_joined = benchmark_two_tensors = benchmark_geglu = benchmark_clipped = benchmark_training = None

        def benchmark_decode(self) -> None:
            super().benchmark_decode()
            self.out = self.out + 0.02

    with pytest.raises(RuntimeError, match="Verification failed for decode"):
        run(Wrong)
