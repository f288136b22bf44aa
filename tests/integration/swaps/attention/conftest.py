"""Which attention is computed on latents and on chosen keys, and where."""

import pytest
from torch import Tensor

from kernels_ext_npu.swaps.attention import mla_absorb


def watched(monkeypatch: pytest.MonkeyPatch, *methods: str) -> list[int]:
    """Return the numbers of queries of each attention that methods of latents compute from now on."""
    queries: list[int] = []
    for name in methods:
        method = getattr(mla_absorb.Latents, name)

        def noted(self, call, query: Tensor, *rest, method=method) -> Tensor:
            queries.append(query.shape[2])
            return method(self, call, query, *rest)

        monkeypatch.setattr(mla_absorb.Latents, name, noted)
    return queries


@pytest.fixture
def chosen(monkeypatch) -> list[int]:
    """The numbers of queries of each attention to chosen keys."""
    return watched(monkeypatch, "attend_chosen")


@pytest.fixture
def on_latents(monkeypatch) -> list[int]:
    """The numbers of queries of each attention that is computed on latents."""
    return watched(monkeypatch, "attend", "attend_chosen")


@pytest.fixture
def always(monkeypatch) -> None:
    """Attend to chosen keys wherever there are more."""
    monkeypatch.setattr(
        mla_absorb.Latents, "is_cheaper_for_chosen", lambda self, queries, count, gathered: count < self.nope.shape[2]
    )
