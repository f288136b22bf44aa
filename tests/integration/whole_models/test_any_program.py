"""Whatever a user does to a model with kernels, it computes what the model does without them.

Random programs of acts (tests/support/programs/acts) are lived through by a kernelized model on the NPU and by its twin
on the CPU. After each act both compute the same, the report is true, and the same tensors share memory.
``SEED=7 PROGRAMS=20000 ACTS=30 make test-slow ARGS=tests/integration/whole_models/test_any_program.py`` runs others; a
failure names the acts, which are an entry of `FOUND` then.
"""

import os
import tempfile
from collections.abc import Set as AbstractSet
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import kernels_ext_npu
from tests.support.programs.acts.attention import PADDING
from tests.support.programs.program import Program
from tests.support.programs.registry import ACTS
from tests.support.programs.variants import VARIANTS

pytestmark = pytest.mark.usefixtures("frozen")
SEED = int(os.environ.get("SEED", "0"))
SAVERS = ("save_and_load_by_model", "save_and_load_by_hub", "save_and_load_by_accelerate")
HOOKS = (
    "hook_an_activation", "hook_the_gradient_of_an_activation", "hook_all_modules", "hook_before_all_modules",
    "hook_the_gradients_of_all_modules",
)  # fmt: skip
COPIES = ("copy_deeply", "copy_shallowly", "pickle_it", "train_a_copy")
WRITES = (
    "step_with_sgd", "step_by_mezo", "move_to_the_cpu_and_back", "cast_to_bfloat16_and_back", "keep_only_the_outputs",
)  # fmt: skip
LOOK = ("look_at_kept_outputs", 0, False)  # at all that are kept
# whose calls somebody replaces
CALLED = {
    "dense": ("Module", "Linear", "SiLUActivation"), "experts": ("SiLUActivation",),
    "linear attention": ("SiLUActivation",), "two models in one": ("LayerNorm",),
}  # fmt: skip
CLASSES = ("change_a_class", "change_the_forward_of_a_class")
# what everybody does, which random programs of a few acts may leave out
WEIGHTS = (
    "freeze_a_parameter", "take_a_state_dict", "load_the_state_dict", "flatten", "kernelize",
    "write_through_the_flat_buffer", "restore", "assign_a_part", "train", "cast_to_bfloat16_and_back",
    "kernelize_in_inference_mode", "restore_in_inference_mode", "kernelize", "move_to_the_cpu", "move_home",
    "share_an_mlp", "copy_deeply",
)  # fmt: skip
CALLS = (
    "call_with_some_labels", "call_for_the_last_logits", "call_without_labels", "call_with_autocast", "generate",
    "hook_a_projection", "wrap_a_forward", "change_an_activation", "train", "replace_the_forward_of_an_activation",
    "kernelize",
)  # fmt: skip
NAMES = (
    "name_our_attention", "restore_a_part", "name_our_attention", "name_another_attention", "unregister", "register",
    "restore", "kernelize", "unregister",
)  # fmt: skip
USUAL = [
    *((variant, WEIGHTS) for variant in ("dense", "gate and up in one projection")),
    ("dense", CALLS),
    ("experts", ("name_an_experts_implementation", *CALLS)),
    *((variant, NAMES) for variant in ("dense", "linear attention")),
]
# What random programs have found, each to its shortest: the model, and the acts, with a seed where it is all the same
# what that chooses, and with words for what they chose where it is not.
FOUND: list[tuple[str, list[tuple[Any, ...]]]] = [
    *((variant, [(act, 1)]) for act in HOOKS for variant in ("dense", "gate and up in one projection", "experts")),
    *(("linear attention", [(act, 1)]) for act in HOOKS),
    *((variant, [(act, 1) for act in acts]) for variant, acts in USUAL),
    *(("dense", [(act, 1)]) for act in SAVERS),
    ("dense", [("unregister", 1), ("train", 1)]),
    ("pictures", [("change_the_forward_of_a_class", 1467), ("change_a_class", 0), ("change_an_activation", 84)]),
    *(("dense", [(copied, 1), ("unregister", 1), ("train", 1)]) for copied in COPIES),
    ("dense", [("save_and_load_by_pretrained_with_kernels", 1), ("unregister", 1), ("train", 1)]),
    ("dense", [("unregister", 1), ("register", 1), ("change_an_activation", 1), ("train", 1)]),
    ("dense", [("take_a_state_dict", 1), ("restore", 1), ("write_through_the_state_dict", 1)]),
    ("dense", [("restore", 1), ("take_a_state_dict", 1), ("kernelize", 1), ("write_through_the_state_dict", 1)]),
    *(
        ("dense", [(first, 1), (last, 1)])
        for first in ("pickle_it", "save_and_load_the_whole_model")
        for last in ("change_the_forward_of_a_class", "change_a_class")
    ),
    ("dense", [("name_our_attention", 1), ("pickle_it", 1), ("restore_a_part", 1, "Qwen3RMSNorm")]),
    *(("dense", [("call_with_padding", 1, place)]) for place in PADDING),
    *(
        (variant, [("write_between_layers", 1, f"{model}DecoderLayer", *how)])
        for variant, model in (("dense", "Qwen3"), ("experts", "Qwen3Moe"), ("linear attention", "Qwen3_5"))
        for how in ((True, "no_grad"), (False, "inference_mode"))  # behind a layer, and before it
    ),
    *(
        (variant, [("call_with_padded_sources_and_targets", number)])
        for variant in ("encoder and decoder", "relative positions", "two models in one")
        for number in range(4)
    ),
    ("dense", [("attend_in_both_directions", 1), ("call_with_padding", 1)]),
    ("dense", [("call_from_a_model_that_packs", 1)]),
    ("dense", [("wrap_attention_by_name", 1), ("unregister", 1), ("take_the_wrapper_away", 1), ("register", 1)]),
    (
        "dense",
        [("unregister", 1), ("wrap_attention_by_name", 1), ("attend_in_both_directions", 1), ("kernelize", 1)],
    ),
    *(
        ("dense", [("keep_outputs", 1, *how), (act, 1), LOOK])
        for act in WRITES
        for how in (("nullcontext", False), ("no_grad", False), ("nullcontext", True))  # the last with a backward
    ),
    *(
        ("GeGLU, norms around one", [*[("keep_outputs", 1, mode, False), ("step_with_sgd", 1)] * 2, LOOK])
        for mode in ("nullcontext", "inference_mode")
    ),
    # in the order of the model, gate apart from up, and with gaps
    *(
        ("dense", [("flatten", 1, False, *how), ("train", 1), ("step_with_sgd", 1)])
        for how in ((False, 0), (True, 0), (False, 7))
    ),
    *(
        (variant, [("replace_the_calls_of_a_class", 1, cls), ("kernelize", 1), ("take_back_a_change_of_a_class", 1)])
        for variant, classes in CALLED.items()
        for cls in classes
    ),
    *(("dense", [(act, number)]) for act in ("step_by_sam", "step_by_mezo") for number in range(2)),
    *((variant, [("step_with_a_selective_checkpoint", 1)]) for variant in ("dense", "experts", "linear attention")),
    *(("dense", [(act, number), ("train", 1)]) for act in CLASSES for number in range(6)),
    ("two models in one", [("change_the_forward_of_a_class", 1, "LayerNorm", 1.25, True)]),
    ("experts with clipped SwiGLU", [("move_to_the_cpu", 1), ("train", 1)]),
    *(
        ("experts with clipped SwiGLU", [("change_alpha_or_limit", 0, *changed)])
        for changed in (("limit", 3.0), ("alpha", 0.5))
    ),
    ("dense", [("move_to_the_cpu", 1), ("change_the_forward_of_a_class", 1, "Qwen3RMSNorm", 1, True)]),
    (
        "interleaved rotation",
        [("wrap_a_forward", 0, "GlmMLP"), ("change_the_forward_of_a_class", 0, "GlmRMSNorm", 1.25, False)],
    ),
    ("tied embeddings", [("move_to_the_cpu", 1), ("hook_an_activation", 1), ("move_home", 1), ("kernelize", 1)]),
    ("gate and up in one projection", [("copy_deeply", 1), ("register", 1), ("pickle_it", 1)]),
    (
        "linear attention",
        [("replace_a_function_of_linear_attention", 1, "torch_chunk_gated_delta_rule"), ("copy_deeply", 1),
         ("kernelize", 1)],
    ),
    (
        "pictures",
        [("keep_a_weight_as_a_tensor", 0, "model.language_model.layers.0.mlp.up_proj"), ("register", 1),
         ("share_an_activation", 0, "VisionMlp", "SiLUActivation"),
         ("change_the_forward_of_a_class", 0, "Linear", 1.25, False)],
    ),
    ("linear attention", [("hook_all_modules", 1), ("kernelize_for_training", 0), ("call_for_a_tuple", 1)]),
    (
        "tied embeddings",
        [("train", 0), ("parametrize_by_spectral_norm", 0, "model.layers.0.self_attn.k_proj"),
         ("cast_to_bfloat16_and_back", 1), ("kernelize_for_training", 0),
         ("copy_deeply_and_drop_the_kernels_of_the_first", 1)],
    ),
    (
        "GeGLU, norms around one",
        [("add_an_adapter", 0), ("add_or_delete_another_adapter", 0), ("kernelize", 0),
         ("replace_the_calls_of_a_class", 0, "Linear")],
    ),
    (
        "relative positions",  # without a scale of their scores gradients in bfloat16 are 2 to 230% from float64
        [("tie_or_share_data", 0, "decoder.block.0.layer.0.layer_norm.weight", "encoder.final_layer_norm.weight", True),
         ("save_and_load_by_accelerate", 0),
         ("assign_a_part", 1, "decoder.block.0.layer.0.SelfAttention.o.weight",
          "decoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"),
         ("tie_or_share_data", 0, "decoder.block.0.layer.2.DenseReluDense.wo.weight",
          "encoder.block.0.layer.1.DenseReluDense.wo.weight", False),
         ("cast_to_bfloat16", 0)],
    ),
    ("relative positions", [("wrap_a_forward", 0), ("cast_to_half", 0), ("call_without_labels", 0)]),
    ("dense", [("keep_outputs", 0), ("cast_norms", 0), ("go_backward_from_kept_outputs", 0)]),
]  # fmt: skip


class _Base(RuleBasedStateMachine):
    """Starts with a model, with or without kernels, and ends with a process as it was."""

    program: Program | None = None
    possible: AbstractSet[str] = frozenset()

    @initialize(variant=st.sampled_from(sorted(VARIANTS)), kernels=st.sampled_from([True, True, False]))
    def start(self, variant: str, kernels: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.program = Program(variant, Path(self.folder.name), kernels)
        self.possible = set(self.program.possible())

    @precondition(lambda self: self.program is not None and self.program.is_over)
    @rule()
    def stop(self) -> None:
        """Do nothing more: the sides have parted, as they may."""

    def teardown(self) -> None:
        if self.program is not None:
            self.program.close()
            self.folder.cleanup()


def _rule(name: str) -> Any:
    def run(self: _Base, seed: int) -> None:
        assert self.program is not None
        self.program.do(name, seed)
        self.possible = set() if self.program.is_over else set(self.program.possible())

    run.__name__ = name
    return precondition(lambda self: name in self.possible)(rule(seed=st.integers(0, 2**16))(run))


Programs = type("Programs", (_Base,), {name: _rule(name) for name in ACTS})


def run(programs: int, acts: int) -> None:
    """Run some programs of so many acts at most; a failure names its acts, and the seed repeats it."""
    print(f"SEED={SEED} PROGRAMS={programs}")
    profile = settings(
        max_examples=programs,
        stateful_step_count=acts,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    run_state_machine_as_test(seed(SEED)(Programs), settings=profile)


def test_programs_of_a_few_acts() -> None:
    run(40, 5)


@pytest.mark.long
def test_many_programs_of_many_acts() -> None:
    run(int(os.environ.get("PROGRAMS", "3000")), int(os.environ.get("ACTS", "20")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_model_is_served(tmp_path: Path, variant: str) -> None:
    with closing(Program(variant, tmp_path)) as program:
        assert any(row.swapped for row in kernels_ext_npu.report(program.model.model))


@pytest.mark.parametrize(
    ("variant", "acts"),
    [
        pytest.param(
            *each,
            marks=pytest.mark.long if number % 2 else (),  # all together take half a minute
            id=f"{each[0]}: {', '.join(act for act, *_ in each[1])}",
        )
        for number, each in enumerate(FOUND)
    ],
)
def test_what_programs_have_found(tmp_path: Path, variant: str, acts: list[tuple[Any, ...]]) -> None:
    with closing(Program(variant, tmp_path)) as program:
        program.check()
        for act in acts:
            program.do(*act)
        assert not program.is_over


@pytest.mark.parametrize(("variant", "acts"), [
    (
        "tied embeddings",
        [("parametrize_by_spectral_norm", 1, "model.layers.0.self_attn.q_proj"),
         ("zero", 1, "model.layers.0.self_attn.q_proj.parametrizations.weight.original")],
    ),
    ("linear attention", [("cast_to_half", 1), ("zero", 0, "model.embed_tokens.weight")]),
    (
        "GeGLU, norms around one",
        [("zero", 162), ("assign_a_part", 0), ("step_with_a_selective_checkpoint", 0), ("cast_to_half", 0)],
    ),
])  # fmt: skip
def test_a_program_ends_where_zeros_leave_no_numbers(tmp_path: Path, variant: str, acts: list[tuple]) -> None:
    """Queries of zeros, of which torch's attention on the CPU makes zeros; embeddings of zeros in half precision.

    And embeddings that a norm of zeros has moved beyond what half precision holds, to the same infinities.
    """
    with closing(Program(variant, tmp_path)) as program:
        for act in acts:
            program.do(*act)
        assert program.is_over
