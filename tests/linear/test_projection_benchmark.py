"""The benchmark file runs as `kernels benchmark ./Linear` runs it, and agrees with the lines of others."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("Linear", PROJECTED_ROWS=64, INPUTS=32, SIZES=(32, 8, 8))


def test_every_workload_agrees_with_the_lines_of_others() -> None:
    BENCHMARK.assert_verified("projections", "adapters")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("adapters")
