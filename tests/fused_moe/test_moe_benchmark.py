"""The benchmark file runs as `kernels benchmark ./FusedMoE` runs it, and each workload agrees with its reference."""

from tests.support.kernel_benchmarks import KernelBenchmark

BENCHMARK = KernelBenchmark("FusedMoE", RANKS=4, TOKENS=64)
# still more experts than choices, and halves of whole 64 bytes
for model, ranks in {"QWEN3": 1, "GPT_OSS": 1, "DEEPSEEK": 4}.items():
    sizes = BENCHMARK.cls.setup_prefill.__globals__[model]
    BENCHMARK.sizes[model] = sizes._replace(experts=8 * ranks, hidden=96, intermediate=64, choices=4)


def test_every_workload_agrees_with_transformers_lines() -> None:
    BENCHMARK.assert_verified("prefill", "decode", "training", "clipped", "expert_parallel", "grouped_matmul", "router")


def test_a_wrong_result_is_noticed() -> None:
    BENCHMARK.assert_notices("decode")
