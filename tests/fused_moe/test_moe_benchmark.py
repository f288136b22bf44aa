"""The benchmark file runs as `kernels benchmark ./FusedMoE` runs it, and each workload agrees with its reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.cli import benchmark

REPOSITORY = Path(__file__).parents[2] / "FusedMoE"
WORKLOADS = {"prefill", "decode", "training", "clipped", "expert_parallel", "grouped_matmul", "router"}
(CLASS,) = benchmark.discover_benchmark_classes(REPOSITORY / "benchmarks" / "benchmark.py", REPOSITORY)


@pytest.fixture(autouse=True)
def small_models(monkeypatch) -> None:
    """The host is slower than what it stands for. Still more experts than choices, and halves of whole 64 bytes."""
    variables = CLASS.setup_prefill.__globals__
    for model, ranks in {"QWEN3": 1, "GPT_OSS": 1, "DEEPSEEK": 4}.items():
        small = {"experts": 8 * ranks, "hidden": 96, "intermediate": 64, "choices": 4}
        monkeypatch.setitem(variables, model, variables[model]._replace(**small))
    monkeypatch.setitem(variables, "RANKS", 4)
    monkeypatch.setitem(variables, "TOKENS", 64)


def run(benchmark_class: type) -> dict:
    return benchmark.run_benchmark_class(benchmark_class, 1, 0, str(REPOSITORY), is_local=True, revision="local")[0]


def test_every_workload_agrees_with_transformers_lines() -> None:
    results = run(CLASS)
    assert results.keys() >= WORKLOADS
    assert all(result.verified for result in results.values())


def test_a_wrong_result_is_noticed() -> None:
    class Wrong(CLASS):
        benchmark_prefill = benchmark_training = benchmark_clipped = benchmark_expert_parallel = None
        benchmark_grouped_matmul = benchmark_router = None

        def benchmark_decode(self) -> None:
            super().benchmark_decode()
            self.out = self.out + 0.02

    with pytest.raises(RuntimeError, match="Verification failed for decode"):
        run(Wrong)
