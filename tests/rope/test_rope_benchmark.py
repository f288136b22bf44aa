"""The benchmark file runs as `kernels benchmark ./RoPE` runs it, and agrees with transformers' function."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("RoPE", TOKENS=64)


def test_every_workload_agrees_with_transformers_function() -> None:
    BENCHMARK.assert_verified("prefill", "decode", "training", "vision")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("decode", 0.05)
