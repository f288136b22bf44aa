"""The benchmark file runs as `kernels benchmark ./FlashAttention` runs it, and agrees with transformers' lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "FlashAttention"
WORKLOADS = {"causal", "window", "sinks", "packed", "decode", "training"}
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


@pytest.fixture(autouse=True)
def _smaller(monkeypatch) -> None:
    """The host is slower than what it stands for."""
    for name, size in {"LENGTH": 64, "CACHE": 64, "WINDOW": 16, "HEADS": 4, "KEY_HEADS": 2}.items():
        monkeypatch.setitem(CLASS.setup_causal.__globals__, name, size)


def test_every_workload_agrees_with_transformers_lines() -> None:
    results = run(CLASS)
    assert results.keys() >= WORKLOADS
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        benchmark_causal = benchmark_window = benchmark_sinks = benchmark_packed = benchmark_training = None

        def benchmark_decode(self) -> None:
            super().benchmark_decode()
            self.out = self.out + 0.02

    with pytest.raises(RuntimeError, match="Verification failed for decode"):
        run(Wrong)
