"""The benchmark file runs as `kernels benchmark ./LinearAttention` runs it, and agrees with transformers' functions."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("LinearAttention", PREFILL=80, MIXER_HEADS=2, MIXER_SIZE=16, MIXED=8, DECODED=2, SCANNED=8)


def test_every_workload_agrees_with_transformers_functions() -> None:
    BENCHMARK.assert_verified("delta_rule", "kda", "decode", "training", "convolution", "scan")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("decode", 0.05)
