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
LOOK = ("look_at_kept_outputs", 2)  # at all that are kept
# of all modules, of linear layers and of activations; and of layer norms
CALLED = {"dense": (1, 2, 5), "experts": (5,), "linear attention": (5,), "two models in one": (1,)}
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
# what random programs have found, each to its shortest: the model, and the acts with their seeds
FOUND: list[tuple[str, list[tuple[str, int]]]] = [
    *((variant, [(act, 1)]) for act in HOOKS for variant in ("dense", "gate and up in one projection", "experts")),
    *(("linear attention", [(act, 1)]) for act in HOOKS),
    *((variant, [(act, 1) for act in acts]) for variant, acts in USUAL),
    *(("dense", [(act, 1)]) for act in SAVERS),
    ("dense", [("unregister", 1), ("train", 1)]),
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
    ("dense", [("name_our_attention", 1), ("pickle_it", 1), ("restore_a_part", 277)]),
    *(("dense", [("call_with_padding", number)]) for number in range(4)),
    *(
        (variant, [("write_between_layers", number)])
        for variant in ("dense", "experts", "linear attention")
        for number in range(2)
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
        ("dense", [("keep_outputs", number), (act, 1), ("look_at_kept_outputs", 1)])
        for act in WRITES
        for number in (0, 2, 12)  # with gradients, without, and with a backward
    ),
    *(
        ("GeGLU, norms around one", [*[("keep_outputs", number), ("step_with_sgd", 1)] * 2, LOOK])
        for number in (0, 1)  # with gradients, and in inference mode
    ),
    # in the order of the model, gate apart from up, and with gaps
    *(("dense", [("flatten", number), ("train", 1), ("step_with_sgd", 1)]) for number in (2, 10, 6)),
    *(
        (variant, [("replace_the_calls_of_a_class", n), ("kernelize", 1), ("take_back_a_change_of_a_class", 1)])
        for variant, numbers in CALLED.items()
        for n in numbers
    ),
    *(("dense", [(act, number)]) for act in ("step_by_sam", "step_by_mezo") for number in range(2)),
    *((variant, [("step_with_a_selective_checkpoint", 1)]) for variant in ("dense", "experts", "linear attention")),
    *(("dense", [(act, number), ("train", 1)]) for act in CLASSES for number in range(6)),
    ("two models in one", [("change_the_forward_of_a_class", 1)]),  # of layer norms
    ("experts with clipped SwiGLU", [("move_to_the_cpu", 1), ("train", 1)]),
    *(("experts with clipped SwiGLU", [("change_alpha_or_limit", number)]) for number in (53824, 61422)),
    ("dense", [("move_to_the_cpu", 1), ("change_the_forward_of_a_class", 631)]),
    ("interleaved rotation", [("wrap_a_forward", 29512), ("change_the_forward_of_a_class", 53090)]),
    ("tied embeddings", [("move_to_the_cpu", 1), ("hook_an_activation", 1), ("move_home", 1), ("kernelize", 1)]),
    ("gate and up in one projection", [("copy_deeply", 1), ("register", 1), ("pickle_it", 1)]),
    ("linear attention", [("replace_a_function_of_linear_attention", 11789), ("copy_deeply", 1), ("kernelize", 1)]),
    (
        "pictures",
        [("keep_a_weight_as_a_tensor", 43122), ("register", 17627), ("share_an_activation", 57824),
         ("change_the_forward_of_a_class", 31708)],
    ),
    ("linear attention", [("hook_all_modules", 909), ("kernelize_for_training", 43288), ("call_for_a_tuple", 33451)]),
    (
        "tied embeddings",
        [("train", 64734), ("parametrize_by_spectral_norm", 19146), ("cast_to_bfloat16_and_back", 22863),
         ("kernelize_for_training", 48054), ("copy_deeply_and_drop_the_kernels_of_the_first", 17079)],
    ),
    (
        "GeGLU, norms around one",
        [("add_an_adapter", 0), ("add_or_delete_another_adapter", 0), ("kernelize", 0),
         ("replace_the_calls_of_a_class", 0)],
    ),
    (
        "relative positions",  # without a scale of their scores gradients in bfloat16 are 2 to 230% from float64
        [("tie_or_share_data", 14496), ("save_and_load_by_accelerate", 0), ("assign_a_part", 585),
         ("tie_or_share_data", 170), ("cast_to_bfloat16", 0)],
    ),
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
    ("variant", "acts"), FOUND, ids=[f"{variant}: {', '.join(act for act, _ in acts)}" for variant, acts in FOUND]
)
def test_what_programs_have_found(tmp_path: Path, variant: str, acts: list[tuple[str, int]]) -> None:
    with closing(Program(variant, tmp_path)) as program:
        program.check()
        for act, number in acts:
            program.do(act, number)
        assert not program.is_over


@pytest.mark.parametrize(("variant", "acts"), [
    ("tied embeddings", [("parametrize_by_spectral_norm", 19), ("zero", 589)]),
    ("linear attention", [("cast_to_half", 30841), ("zero", 9496)]),
])  # fmt: skip
def test_a_program_ends_where_zeros_leave_no_numbers(tmp_path: Path, variant: str, acts: list[tuple[str, int]]) -> None:
    """Queries of zeros, of which torch's attention on the CPU makes zeros; embeddings of zeros in half precision."""
    with closing(Program(variant, tmp_path)) as program:
        for act, number in acts:
            program.do(act, number)
        assert program.is_over
