"""The benchmark file runs as `kernels benchmark ./FlashAttention` runs it, and agrees with transformers' lines."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("FlashAttention", LENGTH=64, CACHE=64, WINDOW=16, HEADS=4, KEY_HEADS=2)


def test_every_workload_agrees_with_transformers_lines() -> None:
    BENCHMARK.assert_verified("causal", "window", "sinks", "packed", "decode", "training")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("decode")
