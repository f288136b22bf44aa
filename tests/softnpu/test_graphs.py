"""Graphs behave as torch_npu's documentation and its own tests say (Ascend/pytorch, test/npu/test_aclgraph_*.py).

Its ``NPUGraph``, ``torch.npu.graph`` and ``make_graphed_callables`` run here as they are.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch_npu
from torch.testing import assert_close

import softnpu
from tests.softnpu.test_counting import WAITING

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

WAITS = [wait for wait, syncs, _ in WAITING if syncs]
WAITS += [lambda x: torch.ones(3).to(x.device), lambda x: torch.tensor([1, 2], device=x.device)]


@pytest.fixture
def graph() -> torch.npu.NPUGraph:
    return torch.npu.NPUGraph()


@pytest.fixture
def side() -> torch.npu.Stream:
    return torch.npu.Stream()


def test_a_replay_reads_what_its_inputs_hold_then_and_nothing_is_computed_before(graph: torch.npu.NPUGraph) -> None:
    x, total = torch.ones(2, 3, device="npu"), torch.zeros(1, 2, 2, device="npu")
    with torch.npu.graph(graph):
        total += torch.nn.functional.silu(x[:, 1:].t() + 1).unsqueeze(0)
    expected = torch.zeros(1, 2, 2)
    assert_close(total.cpu(), expected)
    for value in (-2.0, 5.0):
        x.fill_(value)
        graph.replay()
        expected += torch.nn.functional.silu(torch.full((1, 2, 2), value + 1))
        assert_close(total.cpu(), expected)


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_cannot_wait_and_the_capture_goes_on(wait, graph: torch.npu.NPUGraph, side: torch.npu.Stream) -> None:
    x = torch.ones(2, 2, device="npu")
    with torch.npu.stream(side):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match=r"1070(27|30)"):
            wait(x)
        y = x + 1
        graph.capture_end()
    graph.replay()
    assert y.tolist() == [[2, 2], [2, 2]]


def test_a_mask_of_another_size_is_refused_while_it_is_captured(graph: torch.npu.NPUGraph) -> None:
    """What it holds is known at the replay only, its shape before."""
    x, mask = torch.zeros(1, 1, 4, 16, dtype=torch.float16, device="npu"), torch.ones(8, 8, dtype=torch.bool).npu()
    with pytest.raises(RuntimeError, match="takes the upper triangle of 2048 x 2048"), torch.npu.graph(graph):
        torch_npu.npu_fusion_attention(x, x, x, 1, "BNSD", atten_mask=mask, sparse_mode=2)


def test_random_numbers_go_on_from_replay_to_replay(graph: torch.npu.NPUGraph) -> None:
    torch.npu.manual_seed(7)
    wanted = [torch.rand(8, device="npu").tolist() for _ in range(5)]
    torch.npu.manual_seed(7)
    with torch.npu.graph(graph):
        a, b = torch.rand(8, device="npu"), torch.rand(8, device="npu")
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn += [a.tolist(), b.tolist()]
    assert [*drawn, torch.rand(8, device="npu").tolist()] == wanted


def test_a_state_that_is_set_inside_counts_from_the_replay(graph: torch.npu.NPUGraph) -> None:
    generator = torch.Generator("npu").manual_seed(3)
    with torch.npu.graph(graph):
        state = generator.get_state()
        a = torch.rand(8, device="npu", generator=generator)
        generator.set_state(state)
        b = torch.rand(8, device="npu", generator=generator)
    generator.manual_seed(4)
    graph.replay()
    wanted = torch.rand(8, device="npu", generator=torch.Generator("npu").manual_seed(4))
    assert a.tolist() == b.tolist() == wanted.tolist()


def test_streams_fork_and_join(graph: torch.npu.NPUGraph, side: torch.npu.Stream) -> None:
    x = torch.ones(3, device="npu")
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            assert torch.npu.is_current_stream_capturing()
            b = x * 5
        a = x + 1
        main.wait_stream(side)
        c = a + b
    x.fill_(2)
    graph.replay()
    assert c.tolist() == [13, 13, 13]


def test_a_stream_that_nobody_waits_for_spoils_the_capture(graph: torch.npu.NPUGraph, side: torch.npu.Stream) -> None:
    x = torch.ones(3, device="npu")
    with torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x * 5
        with pytest.raises(RuntimeError, match="107025"):
            graph.capture_end()
    with torch.npu.stream(side):
        assert (x * 5).tolist() == [5, 5, 5]


def test_an_event_of_a_graph_is_not_for_the_host(graph: torch.npu.NPUGraph) -> None:
    event = torch.npu.Event()
    with torch.npu.graph(graph):
        event.record()
    with pytest.raises(RuntimeError, match="107028"):
        event.synchronize()


def test_memory_is_used_again_within_a_graph(graph: torch.npu.NPUGraph) -> None:
    x = torch.ones(1 << 18, device="npu")  # 1 MB: ten results would be ten
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    with torch.npu.graph(graph):
        y = x
        for _ in range(10):
            y = y + 1
    assert torch.npu.max_memory_allocated() - before < 3 << 20
    graph.replay()
    assert y[0].item() == 11


def test_memory_that_was_freed_is_not_read(graph: torch.npu.NPUGraph) -> None:
    x = torch.ones(4, device="npu")
    with torch.npu.graph(graph):
        x + 1
    del x
    with pytest.raises(RuntimeError, match=r"in add, was freed: keep the tensors"):
        graph.replay()


def test_graphed_callables_train_as_their_originals() -> None:
    torch.manual_seed(0)
    own, graphed = torch.nn.Linear(4, 3).npu(), torch.nn.Linear(4, 3).npu()
    graphed.load_state_dict(own.state_dict())
    sample = torch.randn(2, 4, device="npu", requires_grad=True)
    graphed = torch.npu.make_graphed_callables(graphed, (sample,))
    for _ in range(2):
        x, y = (torch.randn(2, 4).npu().requires_grad_() for _ in range(2))
        y.data.copy_(x.data)
        own(x).square().sum().backward()
        graphed(y).square().sum().backward()
        assert x.grad.tolist() == y.grad.tolist()
        assert own.weight.grad.tolist() == graphed.weight.grad.tolist()
        for module in (own, graphed):
            module.zero_grad()  # a gradient of a graph lies in its memory, which the next replay writes


def test_lengths_are_updated(graph: torch.npu.NPUGraph) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, s, 64, device="npu", dtype=torch.float16) for s in (1, 32, 32))

    def attend(length: int) -> torch.Tensor:
        call = torch_npu.npu_fused_infer_attention_score
        return call(q, k, v, num_heads=2, input_layout="BNSD", scale=0.125, actual_seq_lengths_kv=[length])[0]

    wanted = {length: attend(length).tolist() for length in (7, 30)}
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out = attend(7)
    for length in (7, 30):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [length]}])
        graph.replay()
        assert out.tolist() == wanted[length]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_refused(one_rank: None, graph: torch.npu.NPUGraph) -> None:
    x = torch.ones(4, device="npu")
    said = "allreduce_: the software device captures no collectives"
    with pytest.raises(NotImplementedError, match=said), torch.npu.graph(graph):
        dist.all_reduce(x)


def test_a_replay_counts_as_one(graph: torch.npu.NPUGraph) -> None:
    x = torch.ones(4, device="npu")
    softnpu.reset_counters()
    with torch.npu.graph(graph):
        x.mul_(2).add_(1)
    assert "mul_" not in softnpu.counters()
    graph.replay()
    graph.replay()
    assert softnpu.counters()["graph_replays"] == 2
    assert softnpu.counters(in_graphs=True) == {"mul_": 2, "add_": 2}
    softnpu.reset_counters()
    assert softnpu.counters(in_graphs=True) == {}


def test_the_backend_npugraphs_replays() -> None:
    compiled = torch.compile(lambda x: torch.nn.functional.silu(x * 2) + 1, backend="npugraphs")
    with torch.no_grad():
        for step in range(3):
            x = torch.full((4,), float(step), device="npu")
            softnpu.reset_counters()
            assert_close(compiled(x).cpu(), torch.nn.functional.silu(x.cpu() * 2) + 1)
    assert softnpu.counters()["graph_replays"] == 1
    assert "mul" not in softnpu.counters()
