"""``kernels-ext-npu inspect --tp N --ep N --fsdp N`` as a stranger runs it, and what its figures follow from."""

from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import AutoConfig

from kernels_ext_npu.inspection import inspecting
from kernels_ext_npu.measuring.estimate import RATES
from tests.support.commands import refusal, report, run, said
from tests.support.sizes import sizes

LAYERS, HIDDEN, HEADS, KEYS, WIDTH, EXPERTS, ROUTED, INNER, VOCABULARY = 5, 64, 8, 4, 16, 16, 2, 32, 128
SIZES = sizes(HIDDEN, 96, heads=HEADS, keys=KEYS, width=WIDTH, layers=LAYERS, words=VOCABULARY)
EXPERT_SIZES = {"num_experts": EXPERTS, "num_experts_per_tok": ROUTED, "moe_intermediate_size": INNER}
FEW = 1  # layers, where it does not matter how many there are
TOKENS = 64


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    AutoConfig.for_model("qwen3_moe", **SIZES, **EXPERT_SIZES, tie_word_embeddings=False).save_pretrained(folder)
    return folder


def sent(counts: dict) -> dict[tuple[str, str, int], tuple[int, int]]:
    return {
        (entry["operator"], entry["axis"], entry["ranks"]): (entry["calls"], entry["bytes"])
        for entry in counts["collectives"]
    }


def test_collectives_are_those_that_the_sizes_ask_for(moe: Path) -> None:
    """Worked out by hand: FSDP2 gathers what a layer has besides its experts, experts exchange each routed token."""
    found = report("inspect", moe, "--ep", 4, "--tokens", TOKENS)
    assert found["mesh"] == {"ranks": 4, "tp": 1, "ep": 4, "fsdp": 4, "cp": 1}  # as many as the experts need
    attention = HIDDEN * WIDTH * (2 * HEADS + 2 * KEYS) + 2 * WIDTH
    layer = 2 * (attention + 2 * HIDDEN + HIDDEN * EXPERTS)  # two bytes a number; two norms and a router
    ends = 2 * (2 * VOCABULARY * HIDDEN + HIDDEN)  # embedding, head and norm
    experts = 2 * EXPERTS * 3 * HIDDEN * INNER
    assert found["parameters"] == (LAYERS * (layer + experts) + ends) // 2
    assert found["weight_bytes"] == (LAYERS * (layer + experts) + ends) // 4
    exchanged = 2 * TOKENS * ROUTED * HIDDEN
    lengths = 8 * EXPERTS
    for variant in found["variants"]:
        assert sent(variant["forward"]) == {
            ("all_gather", "fsdp", 4): (LAYERS + 2, LAYERS * layer + ends),
            ("all_to_all", "ep", 4): (3 * LAYERS, LAYERS * (lengths + 2 * exchanged)),
        }
        assert sent(variant["step"]) == {
            ("all_gather", "fsdp", 4): (2 * LAYERS + 3, 2 * LAYERS * layer + ends + 2 * VOCABULARY * HIDDEN),
            ("reduce_scatter", "fsdp", 4): (LAYERS + 2, LAYERS * layer + ends),
            ("all_to_all", "ep", 4): (5 * LAYERS, LAYERS * (lengths + 4 * exchanged)),
        }
        (one,) = variant["forward"]["layers"]
        assert (one["class"], one["number"]) == ("Qwen3MoeDecoderLayer", LAYERS)
        assert one["weight_bytes"] == (layer + experts) // 4
        assert sent(one) == {
            ("all_gather", "fsdp", 4): (1, layer),
            ("all_to_all", "ep", 4): (3, lengths + 2 * exchanged),
        }
    before, after = found["variants"]
    for phase in inspecting.PHASES:
        assert after[phase]["host_waits"] < before[phase]["host_waits"]
        assert after[phase]["launches"] < before[phase]["launches"]


def test_the_estimate_has_the_collectives_of_tensor_parallelism_and_those_of_fsdp_beside_the_kernels(moe: Path) -> None:
    """Two devices have one link of 28 GB/s: a sum of n bytes sends n of them, a gather half of them."""
    forward = report("inspect", moe, "--tp", 2, "--tokens", TOKENS)["variants"][-1]["forward"]
    sums, gathers = (
        [entry for entry in forward["collectives"] if entry["operator"] == name]
        for name in ("all_reduce", "all_gather")
    )
    assert len(sums) == len(gathers) == 1
    assert len(forward["collectives"]) == 2
    sent = sums[0]["bytes"] + gathers[0]["bytes"] / 2
    took = sent / 28e9 / RATES.mesh + (sums[0]["calls"] + gathers[0]["calls"]) * RATES.collective
    assert forward["collective_seconds"] == pytest.approx(took)
    assert forward["device_seconds"] > forward["graph_seconds"] > took
    sharded = report("inspect", moe, "--fsdp", 2, "--tokens", TOKENS)["variants"][-1]["forward"]
    assert sharded["collectives"]
    assert sharded["collective_seconds"] == 0


@pytest.mark.parametrize(
    ("ranks", "keys", "window", "neighbours"),
    [
        (4, KEYS // 2, None, 1),
        (8, KEYS, 12, 4),
        pytest.param(4, KEYS, 5, 1, marks=pytest.mark.long),
        pytest.param(4, KEYS, None, 4, marks=pytest.mark.long),
        pytest.param(8, KEYS, None, 4, marks=pytest.mark.long),
    ],
)
def test_rows_that_ranks_share_exchange_heads_of_neighbours_and_gather_keys_of_other_groups(
    tmp_path: Path, ranks: int, keys: int, window: int | None, neighbours: int
) -> None:
    """Queries, keys, values and results of a part; then keys and values of rows, or what windows of the next block see.

    Each rank, or group of neighbours, has two blocks. Gradients are as many bytes.
    """
    sizes = SIZES | {"num_key_value_heads": keys, "num_hidden_layers": FEW, "tie_word_embeddings": True}
    AutoConfig.for_model("mistral", **sizes, sliding_window=window).save_pretrained(tmp_path)
    found = report("inspect", tmp_path, "--cp", ranks, "--tokens", TOKENS)
    assert found["mesh"]["ranks"] == found["mesh"]["fsdp"] == ranks
    phases = {phase: sent(found["variants"][-1][phase]) for phase in ("forward", "step")}
    cp_ranks = {
        phase: {(key[0], key[2]): of for key, of in each.items() if key[1] == "cp"} for phase, each in phases.items()
    }
    forward, step, groups = {}, {}, ranks // neighbours
    if neighbours > 1:
        number, size = 4 * FEW, FEW * 2 * TOKENS // ranks * 2 * (HEADS + keys) * WIDTH
        forward["all_to_all", neighbours] = number, size
        step["all_to_all", neighbours] = 2 * number, 2 * size
    if groups > 1:
        tokens = TOKENS if window is None else groups * 2 * (window - 1)
        gathered = 2 * FEW, 2 * FEW * 2 * tokens * keys // neighbours * WIDTH
        forward["all_gather", groups] = step["all_gather", groups] = step["reduce_scatter", groups] = gathered
    assert cp_ranks == {"forward": forward, "step": step}


def test_packed_attention_multiplies_within_sequences(tmp_path: Path) -> None:
    """A part of rows in two blocks has the products of its share of a row, whichever keys its blocks see."""
    AutoConfig.for_model("qwen3", **SIZES | {"num_hidden_layers": FEW}).save_pretrained(tmp_path)
    flops = {}
    for ranks in (1, 4):
        found = report("inspect", tmp_path, "--cp", ranks, "--tokens", TOKENS)
        operators = found["variants"][-1]["step"]["operators"]
        flops[ranks] = sum(cost["flops"] for name, cost in operators.items() if "fusion_attention" in name)
    pairs = TOKENS * (TOKENS + 1) / 2
    assert flops[1] == FEW * HEADS * pairs * 14 * WIDTH
    # blocks of eight: the first sees its own triangle, the last one 56 keys before its own
    assert flops[4] == FEW * HEADS * (36 + 36 + 8 * 56) * 14 * WIDTH


def test_the_tables_fit_a_terminal_and_say_what_was_assumed(moe: Path) -> None:
    result = run("inspect", moe, "--tp", 2, "--ep", 4, "--fsdp", 8, "--tokens", TOKENS)
    assert all(len(line) <= 80 for line in result.output.splitlines() if str(moe) not in line)
    output = " ".join(result.output.split())
    for words in (
        "1 of 16 ranks (tp 2, ep 4, fsdp 8)",
        "8 groups of 2 ranks have such inputs, each of its own",
        "routing is taken to be balanced",
        "The kernels change no collective.",
        "; the device's collectives take ",
        "; with collectives, those of FSDP2 only where they take longer than the kernels",
        f"each of {LAYERS} Qwen3MoeDecoderLayer",
        "launches kernels moved waits GB ms ms",
        "without collectives",
    ):
        assert words in output
    for row in ("all_reduce 2 (tp)", "all_to_all 4 (ep)", "all_gather 4 (efsdp)", "reduce_scatter 8 (fsdp)"):
        assert row in output
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (
            "moe",
            ["--tp", 8],
            f"does not divide the {KEYS} heads of model.layers.0.self_attn.k_proj: give one of 1, 2, 4",
        ),
        ("moe", ["--ep", 3], f"does not divide the {EXPERTS} experts of model.layers.0.mlp.experts.gate_up_proj"),
        ("moe", ["--tp", 4, "--ep", 2], "give a multiple of 4 as --ep, or another --tp"),
        ("moe", ["--ep", 8, "--fsdp", 4], "multiple of 8: give --fsdp 8, or a multiple of it"),
        ("moe", ["--tp", 0], "--tp"),
        ("moe", ["--cp", 4, "--fsdp", 2], "give a multiple of 4 as --fsdp"),
        ("moe", ["--cp", 4, "--tokens", 63], "--tokens a multiple of 8"),
        ("llama", ["--ep", 2], "LlamaForCausalLM has no experts, or no plan to distribute them"),
        ("bert", ["--tp", 2], "BertForMaskedLM has no plan of tensor parallelism in transformers: use --fsdp"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_in_a_sentence(
    moe: Path, tmp_path: Path, model: str, arguments: list, words: str
) -> None:
    folder = moe
    if model != "moe":
        folder = tmp_path
        AutoConfig.for_model(model, **SIZES).save_pretrained(folder)
    assert words in refusal("inspect", folder, *arguments)
    assert not dist.is_initialized()


def test_a_plan_that_reaches_little_is_remarked(tmp_path: Path) -> None:
    """transformers 5.22 shards the head of gpt-oss, and nothing else."""
    AutoConfig.for_model("gpt_oss", **SIZES | {"num_hidden_layers": FEW}, num_local_experts=4).save_pretrained(tmp_path)
    output = said("inspect", tmp_path, "--tp", 2, "--tokens", TOKENS)
    assert "plan of tensor parallelism shards" in output
    assert "lm_head" in output
