"""The benchmark file runs as `kernels benchmark ./Activation` runs it, and agrees with transformers' forward."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("Activation")


def test_every_workload_agrees_with_transformers_forward() -> None:
    BENCHMARK.assert_verified("quick_gelu", "gelu_tanh", "training")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("quick_gelu")
