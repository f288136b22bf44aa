"""The benchmark file runs as `kernels benchmark ./RoPE` runs it, and each workload agrees with its reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "RoPE"
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


def test_every_workload_agrees_with_transformers_function() -> None:
    results = run(CLASS)
    assert {"prefill", "decode", "training", "vision"} <= results.keys()
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        setup_prefill = setup_training = setup_vision = CLASS.setup_decode

        def benchmark_decode(self) -> None:
            super().benchmark_decode()
            self.out = self.out + 0.05

        benchmark_training = benchmark_vision = CLASS.benchmark_prefill
        verify_training = verify_vision = CLASS.verify_prefill

    with pytest.raises(RuntimeError, match="Verification failed for decode"):
        run(Wrong)
