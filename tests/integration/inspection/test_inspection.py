"""What ``kernels-ext-npu inspect`` counts on fake tensors is what happens on the software device."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kernels_ext_npu
from kernels_ext_npu.inspection.counting import repetition
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues, UnknownValueError
from kernels_ext_npu.inspection.counting.phases import GROWING, STATIC, replays
from kernels_ext_npu.inspection.subject import Subject
from tests.support import memory, npu_counts, zoo
from tests.support.costs import SOC, published
from tests.support.launches import computing

BATCH, TOKENS, TOKEN = 2, 16, 5
Prepare = Callable[[PreTrainedModel], object]


def described(name: str, **sizes: object) -> Subject:
    model = zoo.build(name, **sizes)
    return Subject("it", model.config, type(model), [])


@pytest.fixture(params=["original", "swapped"])
def prepare(request: pytest.FixtureRequest) -> Prepare:
    """What is done to a model: nothing, or kernels are put into it."""
    if request.param == "original":
        return lambda model: None
    kernels_ext_npu.register()
    return kernels_ext_npu.kernelize


def made_ids() -> torch.Tensor:
    return torch.full((BATCH, TOKENS), TOKEN).to("npu")


def run(model: PreTrainedModel, ids: torch.Tensor, phase: str) -> None:
    """Do on the device what a phase counts; of decoding one token behind the others."""
    model.train(phase == "step")
    if phase == "step":
        model(input_ids=ids, use_cache=False, labels=ids).loss.backward()  # holds no logits
        return
    with torch.no_grad():
        if phase == "forward":
            model(input_ids=ids, use_cache=False)
            return
        config, place = model.config, torch.full((BATCH, 1), TOKENS).to("npu")
        cache = DynamicCache(config=config) if phase == GROWING else StaticCache(config, max_cache_len=TOKENS + 1)
        model(ids, past_key_values=cache, use_cache=True)
        token = ids[:, -1:]
        npu_counts.reset()
        model(input_ids=token, past_key_values=cache, use_cache=True, position_ids=place)


COUNTED = ("forward", "step")


@pytest.mark.parametrize(("name", "phases"), [
    ("qwen3", (*COUNTED, STATIC)),
    ("gemma3_text", COUNTED),
    ("qwen3_moe", COUNTED),
    ("gpt_oss", COUNTED),
    ("qwen2_5_vl", COUNTED),
    ("deepseek_v3", COUNTED),
    ("mamba2", COUNTED),
    *(pytest.param(name, (GROWING, STATIC), marks=pytest.mark.long) for name in ("qwen3", "gemma3_text", "qwen3_moe")),
])  # fmt: skip
def test_launches_and_waits_are_those_of_the_device(name: str, phases: tuple[str, ...], prepare: Prepare) -> None:
    real, ids = zoo.build(name, torch.bfloat16).to("npu"), made_ids()
    prepare(real)
    with published(Subject("it", real.config, type(real), []), TOKENS, prepare, BATCH) as (_, count):
        counted = {phase: count(phase) for phase in phases}
    for phase, counts in counted.items():
        run(real, ids, phase)  # caches fill
        real.zero_grad()
        npu_counts.reset()
        run(real, ids, phase)
        happened = Counter(npu_counts.read())
        assert (phase, counts.waits) == (phase, happened.pop("stream_syncs"))
        del happened["device_to_host_copies"]
        assert computing(counts.launches) == computing(happened), phase


LLAMA = "llama", {}, [4], ("forward", STATIC)
GEMMA3 = "gemma3_text", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, [3], COUNTED
DEEPSEEK_V3 = "deepseek_v3", {"first_k_dense_replace": 3}, [3, 3], COUNTED
# layers with kernels hand sums on to the next one; of models without them one is enough
LIKE_OTHERS = [
    pytest.param(which, *each, marks=pytest.mark.long)
    for which, each in (("original", GEMMA3), ("original", DEEPSEEK_V3), ("swapped", DEEPSEEK_V3))
]


@pytest.mark.parametrize(("prepare", "name", "own", "kinds", "phases"), [
    *((which, *LLAMA) for which in ("original", "swapped")),
    ("swapped", *GEMMA3),
    *LIKE_OTHERS,
], indirect=["prepare"])  # fmt: skip
def test_a_few_layers_tell_what_all_cost(name: str, own: dict, kinds: list[int], phases, prepare: Prepare) -> None:
    config = described(name, num_hidden_layers=len(own.get("layer_types", ())) or sum(kinds), **own)
    with published(config, TOKENS, prepare, BATCH) as (model, count):
        assert [len(kind.layers) for kind in repetition.find_kinds(model)] == kinds
        few = [count(phase) for phase in phases]
        for number, layer in enumerate(model.model.layers):
            layer.label = f"like no other: {number}"
        assert repetition.find_kinds(model) == []
        whole = [count(phase) for phase in phases]
    for counted, exact in zip(few, whole):
        assert +counted.launches == exact.launches
        assert +counted.bytes == exact.bytes
        assert counted.waits == exact.waits
        assert sum(counted.seconds.values()) == pytest.approx(sum(exact.seconds.values()))
        # tensors that one kind's first layer makes may live beside others of the last: part of one layer's
        assert counted.peak == pytest.approx(exact.peak, rel=0.02)


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_waits_or_copies_numbers_of_the_host_is_no_replay(registered: None, reads: bool) -> None:
    def hook(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if reads:
            return output * float(torch.arange(3, device="npu").sum().item())
        return output * torch.tensor([2.0], device="npu")

    with published(described("qwen3"), TOKENS) as (model, count):
        model.model.norm.register_forward_hook(hook)
        found = count(STATIC)
    assert (found.waits, found.copies_in) == ((1, 0) if reads else (0, 1))
    assert replays(STATIC, found) == 0


@pytest.mark.parametrize("phase", ["forward", "step"])
def test_the_predicted_peak_is_that_of_the_allocator(phase: str, prepare: Prepare) -> None:
    config = described("llama", num_hidden_layers=5)
    real, ids = config.model_class(config.config).to("npu"), made_ids()
    prepare(real)
    for _ in range(2):  # caches fill in the first run
        real.zero_grad()
        before = memory.start()
        run(real, ids, phase)
        happened = memory.requested("peak") - before
    gradients = sum(p.grad.numel() * 4 for p in real.parameters() if p.grad is not None)
    with published(config, TOKENS, prepare, BATCH, torch.float32) as (_, count):
        predicted = count(phase).peak
    # Gradients are no activations; at the peak, which is early in the backward, few of them exist. The device may hold
    # a scalar more or less.
    assert predicted - 512 <= happened <= predicted + gradients
    assert phase == "step" or predicted == happened


def test_experts_in_a_loop_of_the_host_get_equal_shares_of_the_tokens() -> None:
    """Which experts are hit follows from weights; the loop asks the host for each."""
    layers, experts = 3, 4
    config = described("mixtral", num_hidden_layers=layers, num_local_experts=experts, num_experts_per_tok=2)
    with published(config, TOKENS, lambda model: model.set_experts_implementation("eager")) as (_, count):
        counted = count("forward")
    others = 1 + 5 * layers  # the head; q, k, v, o and the router
    assert counted.launches["matmul"] == others + 2 * layers * experts
    assert counted.waits > layers * experts


def test_a_layer_that_gives_something_else_is_not_left_out() -> None:
    """Layers that all halve their input are alike, and still each of them has to run."""

    class Halving(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states[:, ::2] * 2

    def prepare(model: PreTrainedModel) -> None:
        model.halving = nn.ModuleList(Halving() for _ in range(4))

    with published(described("llama", num_hidden_layers=1), TOKENS, prepare) as (model, count):
        original = model.forward

        def forward(**inputs: object) -> object:
            hidden_states = original(**inputs).logits
            for layer in model.halving:
                hidden_states = layer(hidden_states)
            return (hidden_states,)

        assert [len(kind.layers) for kind in repetition.find_kinds(model)] == [4]
        before = count("forward").launches["mul"]
        model.forward = forward
        assert count("forward").launches["mul"] == before + 4


def fused(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> None:
    options = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    torch.ops.npu.npu_grouped_matmul([x], [weight], group_list=counts.long(), **options)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


SQUARE, WIDE, HEADS = (4096, 4096), (4096, 8192), (1, 8, 4096, 128)


@pytest.mark.parametrize(("function", "shapes", "dtype", "expected", "more"), [
    # what operations take
    (torch.matmul, (SQUARE, WIDE), torch.bfloat16, 2 * 4096 * 4096 * 8192 / 294.9e12, 0),
    (torch.matmul, (SQUARE, WIDE), torch.float16, 2 * 4096 * 4096 * 8192 / 313e12, 0),
    (fused, ((65536, 1024), (8, 1024, 1024), (8,)), torch.bfloat16, 2 * 65536 * 1024 * 1024 / 294.9e12, 0),
    # of causal attention half of two products; and a mask is made
    (attention, ((1, 32, 4096, 128), HEADS, HEADS), torch.bfloat16, 2 * 32 * 4096 * 4096 * 128 / 294.9e12, 0.05),
    # what bytes take: those of a product with one row, and of an elementwise operator
    (torch.matmul, ((1, 4096), WIDE), torch.bfloat16, 2 * (4096 + 4096 * 8192 + 8192) / SOC.bandwidth, 0),
    (torch.add, (SQUARE, SQUARE), torch.bfloat16, 3 * 2 * 4096**2 / SOC.bandwidth, 0),
])  # fmt: skip
def test_an_operator_takes_what_its_operations_or_bytes_take(function, shapes, dtype, expected, more) -> None:
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device="npu") for shape in shapes]
        with Counting(KnownValues(), SOC) as counting:
            function(*tensors)
    assert counting.counts().roofline == pytest.approx(expected, rel=more or 1e-6)


def test_products_by_groups_read_the_experts_that_have_tokens() -> None:
    """A token of three experts among 128 reads no others, whatever multiplies them."""

    def loop(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> None:
        torch._grouped_mm(x, weight, offs=ends)

    def listed(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> None:
        options = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
        torch.ops.npu.npu_grouped_matmul([x], list(weight), **options)

    for product in (fused, listed, loop):
        with FakeTensorMode(), Counting(KnownValues(), SOC) as counting:
            x, weight = (torch.empty(s, dtype=torch.bfloat16, device="npu") for s in ((3, 64), (128, 64, 32)))
            product(x, weight, torch.empty(128, dtype=torch.int32, device="npu"))
        moved = counting.bytes["mm" if product is loop else "npu_grouped_matmul"]
        least = 2 * (3 * 64 + 3 * 64 * 32 + 3 * 32)
        assert least <= moved <= least + 8 * 128 + 2 * 3 * 32  # and the counts, or what mm writes into


def test_loops_that_write_into_a_tensor_run_once_on_fake_tensors() -> None:
    with FakeTensorMode() as fake, Counting(KnownValues(), SOC) as counting:
        states = torch.empty(6, 2, 4, 4, device="npu").unbind()
        before = sum(fake.cache_info().bypasses.values())
        for n in range(5):
            torch.baddbmm(states[n], states[n], states[n], out=states[n + 1])
        assert sum(fake.cache_info().bypasses.values()) == before + 1  # others take a millisecond
    assert counting.launches == {"baddbmm": 5}


def test_values_that_follow_from_sizes_are_known_and_others_are_not() -> None:
    values = KnownValues()
    with FakeTensorMode(allow_non_fake_inputs=True), Counting(values, SOC):
        positions = torch.arange(6, device="npu")
        assert (positions.view(2, 3).sum(1) == torch.tensor([3, 12], device="npu")).all()
        assert positions[positions > 3].tolist() == [4, 5]
        assert torch.randn(6, device="npu")[positions > 3].shape == (2,)
        assert values.waits == 1 + 1 + 2 + 1  # all(), two masks and the two values of tolist()
        written = torch.zeros(6, dtype=torch.long, device="npu")
        view = written[2:]
        view.add_(1)
        assert written.tolist() == [0, 0, 1, 1, 1, 1]
        written.copy_(torch.randn(6, device="npu"))
        for unknown in (view, torch.randn(1, device="npu")):
            with pytest.raises(UnknownValueError, match="_local_scalar_dense"):
                unknown[0].item()
        with pytest.raises(UnknownValueError, match="nonzero"):
            torch.randn(6, device="npu").nonzero()
        scores, experts = torch.randn(4, 8, device="npu").topk(2)
        assert experts.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(UnknownValueError):
            scores[0, 0].item()
