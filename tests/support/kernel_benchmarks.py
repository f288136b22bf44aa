"""Run the benchmark file of a kernel repository as `kernels benchmark ./Repository` runs it, with small sizes."""

from pathlib import Path
from typing import Any

import pytest
from kernels.cli import benchmark
from torch import Tensor

ROOT = Path(__file__).parents[2]


class KernelBenchmark:
    """The benchmark of a repository: the host is slower than what it stands for, so ``sizes`` replace its own."""

    def __init__(self, repository: str, **sizes: Any) -> None:
        self.path, self.sizes = ROOT / repository, sizes
        (self.cls,) = benchmark.discover_benchmark_classes(self.path / "benchmarks" / "benchmark.py", self.path)
        self.names = [name.removeprefix("benchmark_") for name in vars(self.cls) if name.startswith("benchmark_")]

    def assert_verified(self, *workloads: str) -> None:
        """Run all of them, these among them, and compare each with what it stands for."""
        results = self._run(self.cls)
        assert results.keys() >= {*workloads}
        assert all(result.verified for result in results.values())

    def assert_notices(self, workload: str, error: float = 0.02) -> None:
        """Run a workload whose result is wrong, and no other."""

        def wrong(self: Any) -> None:
            run(self)
            assert isinstance(self.out, Tensor)
            self.out = self.out + error

        run = getattr(self.cls, f"benchmark_{workload}")
        others = dict.fromkeys([f"benchmark_{name}" for name in self.names if name != workload])
        with pytest.raises(RuntimeError, match=f"Verification failed for {workload}"):
            self._run(type("Wrong", (self.cls,), others | {f"benchmark_{workload}": wrong}))

    def _run(self, cls: type) -> dict:
        setup = getattr(self.cls, f"setup_{self.names[0]}")
        with pytest.MonkeyPatch.context() as patch:
            for name, size in self.sizes.items():
                patch.setitem(setup.__globals__, name, size)
            return benchmark.run_benchmark_class(cls, 1, 0, str(self.path), is_local=True, revision="local")[0]
