"""The benchmark file runs as `kernels benchmark ./Activation` runs it, and each workload agrees with its reference."""

from __future__ import annotations

from pathlib import Path

from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "Activation"


def test_every_workload_agrees_with_transformers_forward() -> None:
    (workloads,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)
    results = benchmark.run_benchmark_class(workloads, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]
    assert {"quick_gelu", "gelu_tanh", "training"} <= results.keys()
    assert all(result.verified for result in results.values())
