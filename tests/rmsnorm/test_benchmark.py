"""The benchmark file runs as `kernels benchmark ./RMSNorm` runs it, and agrees with transformers' forward."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("RMSNorm", TOKENS=64)


def test_every_workload_agrees_with_transformers_forward() -> None:
    BENCHMARK.assert_verified("hidden_states", "query_heads", "decode", "training", "add")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("decode")
