"""The benchmark files run as `kernels benchmark ./Repository` runs them, and agree with the lines of others."""

from pathlib import Path
from typing import Any

import pytest
from kernels.cli import benchmark
from torch import Tensor

from kernels_ext_npu.catalogue import REPOSITORIES

ROOT = Path(__file__).parents[1]
# sizes in place of those of the file: the host is slower than what it stands for
SIZES: dict[str, dict[str, Any]] = {
    "Activation": {},
    "CrossEntropy": {"TOKENS": 32, "HIDDEN_SIZE": 16, "WORDS": 200},
    "FlashAttention": {"LENGTH": 64, "CACHE": 64, "WINDOW": 16, "HEADS": 4, "KEY_HEADS": 2},
    "FusedMoE": {"RANKS": 4, "TOKENS": 64},
    "Linear": {"PROJECTED_ROWS": 64, "INPUTS": 32, "SIZES": (32, 8, 8)},
    "LinearAttention": {
        "PREFILL": 80, "MIXER_HEADS": 2, "MIXER_SIZE": 16, "MIXED": 8, "DECODED": 2, "SCANNED": 8
    },
    "RMSNorm": {"TOKENS": 64},
    "RoPE": {"TOKENS": 64},
    "SwiGLU": {"TOKENS": 64},
}  # fmt: skip
each_repository = pytest.mark.parametrize("repository", REPOSITORIES)


def benchmark_class(repository: str) -> type:
    path = ROOT / repository
    (cls,) = benchmark.discover_benchmark_classes(path / "benchmarks" / "benchmark.py", path)
    return cls


def workloads(cls: type) -> list[str]:
    return [name.removeprefix("benchmark_") for name in vars(cls) if name.startswith("benchmark_")]


def run(repository: str, cls: type, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    names = getattr(cls, next(name for name in dir(cls) if name.startswith("setup_"))).__globals__
    sizes = dict(SIZES[repository])
    if repository == "FusedMoE":  # still more experts than choices, and halves of whole 64 bytes
        for model, ranks in {"QWEN3": 1, "GPT_OSS": 1, "DEEPSEEK": 4}.items():
            sizes[model] = names[model]._replace(experts=8 * ranks, hidden=96, intermediate=64, choices=4)
    for name, size in sizes.items():
        monkeypatch.setitem(names, name, size)
    return benchmark.run_benchmark_class(cls, 1, 0, str(ROOT / repository), is_local=True, revision="local")[0]


@each_repository
def test_every_workload_agrees_with_the_lines_of_others(repository: str, monkeypatch) -> None:
    cls = benchmark_class(repository)
    results = run(repository, cls, monkeypatch)
    assert results.keys() == set(workloads(cls)) != set()
    assert all(result.verified for result in results.values())


@each_repository
def test_a_wrong_result_is_noticed(repository: str, monkeypatch) -> None:
    """Of one workload, and no other."""
    cls = benchmark_class(repository)
    workload, *_ = workloads(cls)
    right = getattr(cls, f"benchmark_{workload}")
    error = 0.05 if repository in ("LinearAttention", "RoPE") else 0.02

    def wrong(self: Any) -> None:
        right(self)
        assert isinstance(self.out, Tensor)
        self.out = self.out + error

    others = dict.fromkeys([f"benchmark_{name}" for name in workloads(cls)])
    with pytest.raises(RuntimeError, match=f"Verification failed for {workload}"):
        run(repository, type("Wrong", (cls,), others | {f"benchmark_{workload}": wrong}), monkeypatch)
