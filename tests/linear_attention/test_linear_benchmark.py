"""The benchmark file runs as `kernels benchmark ./LinearAttention` runs it, and agrees with transformers' functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "LinearAttention"
WORKLOADS = {"delta_rule", "kda", "decode", "training", "convolution", "scan"}
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


@pytest.fixture(autouse=True)
def _smaller(monkeypatch) -> None:
    """The host is slower than what it stands for."""
    for name, size in {
        "PREFILL": 80,
        "MIXER_HEADS": 2,
        "MIXER_SIZE": 16,
        "MIXED": 8,
        "DECODED": 2,
        "SCANNED": 8,
    }.items():
        monkeypatch.setitem(CLASS.setup_kda.__globals__, name, size)


def test_every_workload_agrees_with_transformers_functions() -> None:
    results = run(CLASS)
    assert results.keys() >= WORKLOADS
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        benchmark_delta_rule = benchmark_kda = benchmark_training = benchmark_convolution = benchmark_scan = None

        def benchmark_decode(self) -> None:
            super().benchmark_decode()
            self.out = self.out + 0.05

    with pytest.raises(RuntimeError, match="Verification failed for decode"):
        run(Wrong)
