"""The benchmark file runs as `kernels benchmark ./CrossEntropy` runs it, and agrees with transformers' lines."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("CrossEntropy", TOKENS=32, HIDDEN_SIZE=16, WORDS=200)


def test_every_workload_agrees_with_transformers_lines() -> None:
    BENCHMARK.assert_verified("head", "training", "logits")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("logits")
