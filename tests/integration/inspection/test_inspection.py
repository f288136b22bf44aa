"""What ``kernels-ext-npu inspect`` counts on fake tensors is what happens on the software device."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, PreTrainedModel

import kernels_ext_npu
import softnpu
from kernels_ext_npu.inspection.counting import repetition
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues, UnknownValueError
from kernels_ext_npu.inspection.counting.phases import count
from kernels_ext_npu.measuring import roofline
from tests.support import memory, zoo
from tests.support.launches import computing
from tests.support.sizes import sizes

SOC = roofline.SOCS["910b"]
BATCH, TOKENS, TOKEN = 2, 16, 5


swapped_or_not = pytest.mark.parametrize("swapped", [False, True], ids=["original", "swapped"])
in_training_or_not = pytest.mark.parametrize("training", [False, True], ids=["forward", "step"])


class Fake:
    """A model on fake tensors, as inspect() builds it, and what it costs."""

    def __init__(self, cls: type[PreTrainedModel], config: object, dtype: torch.dtype = torch.float32) -> None:
        self.values = KnownValues()
        with Counting(self.values, SOC), torch.device("npu"):
            self.model = cls._from_config(config, dtype=dtype)
        ids = torch.empty(BATCH, TOKENS, dtype=torch.long, device="npu")
        with _disable_current_modes():
            real = torch.full((BATCH, TOKENS), TOKEN)
        self.inputs = {"input_ids": self.values.learn(ids, real), "use_cache": False}

    def count(self, training: bool) -> Counts:
        if training:
            return count("step", self.model, self.inputs | {"labels": self.inputs["input_ids"]}, self.values, SOC)
        return count("forward", self.model, self.inputs, self.values, SOC)


@contextmanager
def kernels(model: nn.Module, wanted: bool) -> Iterator[None]:
    if wanted:
        kernels_ext_npu.register()
        kernels_ext_npu.kernelize(model)
    try:
        yield
    finally:
        if wanted:
            kernels_ext_npu.restore(model)
            kernels_ext_npu.unregister()


def run(model: PreTrainedModel, ids: torch.Tensor, training: bool) -> None:
    model.train(training)
    with torch.set_grad_enabled(training):
        if training:
            model(input_ids=ids, use_cache=False, labels=ids).loss.backward()  # holds no logits
        else:
            model(input_ids=ids, use_cache=False)


@swapped_or_not
@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen2_5_vl", "deepseek_v3", "mamba2"]
)
def test_launches_and_waits_are_those_of_the_device(name: str, swapped: bool) -> None:
    real = zoo.build(name, torch.bfloat16).to("npu")
    happened = {}
    with kernels(real, swapped):
        ids = torch.full((BATCH, TOKENS), TOKEN).to("npu")
        for training in (False, True):
            run(real, ids, training)  # caches fill
            real.zero_grad()
            softnpu.reset_counters()
            run(real, ids, training)
            happened[training] = Counter(softnpu.counters())
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Fake(type(real), real.config, torch.bfloat16)
        with kernels(fake.model, swapped):
            counted = {training: fake.count(training) for training in happened}
    for training, counts in counted.items():
        assert counts.waits == happened[training].pop("stream_syncs")
        del happened[training]["device_to_host_copies"]
        assert computing(counts.launches) == computing(happened[training])


def config(model_type: str, layers: int, **others: object) -> object:
    tiny = sizes(64, 256, heads=4, keys=2, width=16, layers=layers, words=32)
    return AutoConfig.for_model(model_type, **tiny | others)


DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 3,
}


@swapped_or_not
@pytest.mark.parametrize(
    ("model_type", "own", "kinds"),
    [
        ("gemma3_text", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, [3]),
        ("deepseek_v3", DEEPSEEK, [3, 3]),
    ],
)
def test_a_few_layers_tell_what_all_cost(model_type: str, own: dict, kinds: list[int], swapped: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        described = config(model_type, len(own.get("layer_types", ())) or sum(kinds), **own)
        fake = Fake(zoo_class(described), described, torch.bfloat16)
        with kernels(fake.model, swapped):
            assert [len(kind.layers) for kind in repetition.find_kinds(fake.model)] == kinds
            few = [fake.count(training) for training in (False, True)]
            for number, layer in enumerate(fake.model.model.layers):
                layer.label = f"like no other: {number}"
            assert repetition.find_kinds(fake.model) == []
            whole = [fake.count(training) for training in (False, True)]
    for counted, exact in zip(few, whole):
        assert +counted.launches == exact.launches
        assert +counted.bytes == exact.bytes
        assert counted.waits == exact.waits
        assert sum(counted.seconds.values()) == pytest.approx(sum(exact.seconds.values()))
        # tensors that one kind's first layer makes may live beside others of the last: part of one layer's
        assert counted.peak == pytest.approx(exact.peak, rel=0.02)


def zoo_class(described: object) -> type[PreTrainedModel]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(described)]


@swapped_or_not
@in_training_or_not
def test_the_predicted_peak_is_that_of_the_allocator(training: bool, swapped: bool) -> None:
    described = config("llama", 5)
    real = zoo_class(described)(described).to("npu")
    ids = torch.full((BATCH, TOKENS), TOKEN).to("npu")
    with kernels(real, swapped):
        for _ in range(2):  # caches fill in the first run
            real.zero_grad()
            before = memory.start()
            run(real, ids, training)
            happened = memory.requested("peak") - before
    gradients = sum(p.grad.numel() * 4 for p in real.parameters() if p.grad is not None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Fake(type(real), described)
        with kernels(fake.model, swapped):
            predicted = fake.count(training).peak
    # Gradients are no activations; at the peak, which is early in the backward, few of them exist. The device may hold
    # a scalar more or less.
    assert predicted - 512 <= happened <= predicted + gradients
    assert training or predicted == happened


def test_experts_in_a_loop_of_the_host_get_equal_shares_of_the_tokens() -> None:
    """Which experts are hit follows from weights; the loop asks the host for each."""
    layers, experts = 3, 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        described = config("mixtral", layers, num_local_experts=experts, num_experts_per_tok=2)
        fake = Fake(zoo_class(described), described, torch.bfloat16)
        fake.model.set_experts_implementation("eager")
        counted = fake.count(training=False)
    others = 1 + 5 * layers  # the head; q, k, v, o and the router
    assert counted.launches["matmul"] == others + 2 * layers * experts
    assert counted.waits > layers * experts


def test_a_layer_that_gives_something_else_is_not_left_out() -> None:
    """Layers that all halve their input are alike, and still each of them has to run."""

    class Halving(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states[:, ::2] * 2

    with FakeTensorMode(allow_non_fake_inputs=True):
        described = config("llama", 1)
        fake = Fake(zoo_class(described), described)
        fake.model.halving = nn.ModuleList(Halving() for _ in range(4))
        original = fake.model.forward

        def forward(**inputs: object) -> object:
            hidden_states = original(**inputs).logits
            for layer in fake.model.halving:
                hidden_states = layer(hidden_states)
            return (hidden_states,)

        assert [len(kind.layers) for kind in repetition.find_kinds(fake.model)] == [4]
        before = fake.count(training=False).launches["mul"]
        fake.model.forward = forward
        assert fake.count(training=False).launches["mul"] == before + 4


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
    assert counting.counts().estimate == pytest.approx(expected, rel=more or 1e-6)


def test_products_by_groups_read_the_experts_that_have_tokens() -> None:
    """Of 128, three: a token of a mixture reads no others, whatever multiplies them."""

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
