"""The benchmark file runs as `kernels benchmark ./SwiGLU` runs it, and agrees with transformers' lines."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("SwiGLU", TOKENS=64)


def test_every_workload_agrees_with_transformers_lines() -> None:
    BENCHMARK.assert_verified("joined", "two_tensors", "geglu", "clipped", "decode", "training")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("decode")
