"""Where a release of CANN serves less than a later one, reports and commands say so, and name the later one."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.machine import cann_releases
from kernels_ext_npu.selftest import limits, operators, runner
from kernels_ext_npu.selftest.operator_call import NEVER, OperatorCall

ROUTING = "CANN 8.2 routes only 256 experts in groups of eight; since 8.3 all"
TRAINING = "CANN 8.2 routes in one launch in inference alone; since 8.3 in training, too"
EXPERTS = "CANN 8.2 sums gradients of experts' weights up in float32, at twice their size; since 8.3 in their own dtype"
EXPERTS_IN_FLOAT32 = "CANN 8.2 has the host wait for gradients of experts' weights in float32; since 8.3 for none"
CHOSEN = "CANN {} leaves gradients of float32 routing weights of experts in 16 bits to torch; since 9.0 takes them"
NORMS = "CANN 8.2 trains norms with 1 + weight in 16 bits between two casts; since 8.3 without"
ROTATED = "CANN 8.3 rotates up to 42 heads of 128 of a token together; since 9.0 any number"
ROTATED_IN_8_5 = "CANN 8.5 rotates up to 53 heads of 128 of a token together; since 9.0 any number"
RELEASES = [(8, 2), (8, 3), (8, 5), (9, 0), (9, 1)]
SMALL = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 8, "vocab_size": 100}
SMALL |= {"q_lora_rank": 8, "kv_lora_rank": 8, "first_k_dense_replace": 0, "num_hidden_layers": 1}
WIDE = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}


def kernelized(model_type: str, dtype: torch.dtype = torch.float32, **sizes: int) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **SMALL, **sizes)
    return kernels_ext_npu.kernelize(AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to("npu"))


Said = dict[tuple[int, int], str]  # by release; of others nothing
ROUTED = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}
DEEPSEEKS = {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
NARROW = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
MIXED = {(8, 2): EXPERTS, (8, 3): CHOSEN.format(8.3), (8, 5): CHOSEN.format(8.5)}
IN_A_ROW = {(8, 2): ROTATED.replace("8.3", "8.2"), (8, 3): ROTATED, (8, 5): ROTATED_IN_8_5}
F32, BF16 = torch.float32, torch.bfloat16
# type, dtype and sizes of a model, a kernel, and what is said of it, in inference and in training
CASES: dict[str, tuple[str, torch.dtype, dict[str, int], str, Said, Said]] = {
    "router of another shape": ("deepseek_v3", F32, ROUTED, "SigmoidTopKRouter", {(8, 2): ROUTING}, {(8, 2): ROUTING}),
    "DeepSeek's own router": ("deepseek_v3", F32, DEEPSEEKS, "SigmoidTopKRouter", {}, {(8, 2): TRAINING}),
    "experts": ("qwen3_moe", BF16, FEW, "MoEExperts", {}, {(8, 2): EXPERTS}),
    "experts in float32": ("qwen3_moe", F32, FEW, "MoEExperts", {}, {(8, 2): EXPERTS_IN_FLOAT32}),
    "experts and router in float32": ("deepseek_v3", F32, ROUTED, "MoEExperts", {}, {(8, 2): EXPERTS_IN_FLOAT32}),
    "experts of a router in float32": ("deepseek_v3", BF16, ROUTED, "MoEExperts", {}, MIXED),
    "norms around zero": ("gemma", BF16, NARROW, "RMSNormZeroCentered", {}, {(8, 2): NORMS}),
    "norms around zero in float32": ("gemma", F32, NARROW, "RMSNormZeroCentered", {}, {}),
    "many heads": ("qwen3", F32, WIDE, "RotaryPosEmb", IN_A_ROW, IN_A_ROW),
    "fewer heads": ("qwen3", F32, WIDE | {"num_attention_heads": 40}, "RotaryPosEmb", {}, {}),
}


def said(model: PreTrainedModel, kernel: str) -> Said:
    """Return what the report says of the first row of a kernel, by the release of the machine."""
    found: Said = {}
    for release in RELEASES:
        with patch.object(torch.version, "cann", ".".join(map(str, release))):
            row, *_ = [row for row in kernels_ext_npu.report(model) if row.kernel == kernel]
        if row.reason is not None:
            assert row.reason.code == "release"
            found[release] = row.reason
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_a_release_does_not_take_is_told_with_the_release_that_takes_it(registered, case: str) -> None:
    model_type, dtype, sizes, kernel, in_inference, in_training = CASES[case]
    model = kernelized(model_type, dtype, **sizes)
    assert said(model, kernel) == in_inference
    assert said(kernels_ext_npu.kernelize(model.train()), kernel) == in_training
    if model_type == "qwen3_moe":
        assert said(model.requires_grad_(False), kernel) == in_inference


def test_the_report_is_about_this_release(registered, monkeypatch) -> None:
    model = kernelized("qwen3", **WIDE)
    assert ROTATED not in str(kernels_ext_npu.report(model))
    monkeypatch.setattr(torch.version, "cann", "8.3.RC1")
    (row,) = [row for row in kernels_ext_npu.report(model) if row.kernel == "RotaryPosEmb"]
    assert (row.reason, row.reason.code) == (ROTATED, "release")


def test_a_version_that_cannot_be_read_is_the_oldest() -> None:
    assert cann_releases.parse_release("not known") == cann_releases.parse_release(None) < (8, 2)
    assert cann_releases.parse_release("8.2.RC1") == cann_releases.parse_release("8.2") == (8, 2)
    assert cann_releases.sentences((9, 1)) == []
    words = "a CANN whose version cannot be read takes the fast GELU in no graph; since 8.5 in graphs, too"
    assert words in cann_releases.sentences((0, 0))


def test_inspect_counts_what_a_release_would_launch(run_forked, tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **SMALL, **WIDE).save_pretrained(tmp_path)
    found = {}
    for cann in ("8.2", ""):
        arguments = ["inspect", str(tmp_path), "--decode", "--tokens", "16", "--json", *(["--cann", cann] * bool(cann))]
        told = json.loads(run_forked(f"from kernels_ext_npu.cli import app; app({arguments!r})").stdout)
        operators = told["variants"][-1]["decode_growing"]["operators"]
        launches = {name: operators[name]["launches"] for name in ("npu_mrope", "npu_rotary_mul") if name in operators}
        found[cann] = launches, told["remarks"], [row["reason"] for row in told["modules"] if row["reason"]]
    words = "CANN 8.2 rotates up to 42 heads of 128 of a token together; since 9.0 any number"
    assert found == {
        "8.2": ({"npu_rotary_mul": 2}, ["kernels: as they are on CANN 8.2"], [words]),
        "": ({"npu_mrope": 1}, [], []),
    }


ALONE = (*limits.LIMITS, *operators.OPERATORS)


@pytest.mark.parametrize("call", ALONE, ids=lambda call: f"{call.title}, {call.dtype}")
def test_the_self_test_asks_both_sides_of_a_limit(call: OperatorCall) -> None:
    """The device refuses what its release does not take, or leaves it unwritten; all else is right."""
    if call.is_refused:
        with pytest.raises(RuntimeError):
            call.ask()
    else:
        assert call.ask()["agrees"]


def test_what_sources_leave_unwritten_is_no_number_or_told() -> None:
    right, zeros = [torch.ones(2)], [torch.zeros(2)]
    exact = [torch.ones(2, dtype=torch.float64)]
    unwritten = OperatorCall("unwritten", lambda: (zeros, exact), unwritten_since=(8, 5))
    assert unwritten.ask() == {"agrees": True, "refused": "left unwritten, as the sources of this CANN say"}
    written = OperatorCall("written", lambda: (right, exact), unwritten_since=(8, 5)).ask()
    assert not written["agrees"]
    assert written["error"] == "computed, rightly, where the sources of this CANN leave it unwritten"
    assert not OperatorCall("wrong", lambda: (zeros, exact), unwritten_since=NEVER).ask()["agrees"]


def test_a_crash_agrees_with_sources_that_say_so_and_with_no_others(monkeypatch) -> None:
    outcome = runner.Outcome(quick=False, ids=["limits | a | float16", "limits | b | float16"])
    outcome.fail(outcome.ids[0], "its process died of SIGFPE", refused=True)
    assert outcome.rows == {outcome.ids[0]: {"agrees": True, "refused": "its process died of SIGFPE"}}
    outcome.fail(outcome.ids[1], "its process died of SIGFPE")
    assert not outcome.agrees


def test_what_sources_refuse_and_a_device_computes_is_told(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cann", "8.2.RC1")  # the device goes on as it was
    (limit,) = [limit for limit in limits.LIMITS if limit.title == "npu_mrope, 43 heads of 128"]
    found = limit.ask()
    assert not found["agrees"]
    assert found["error"] == "computed, rightly, where the sources of this CANN refuse it"
