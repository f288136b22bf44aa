"""A program while it runs: two sides, and the acts that they have lived through."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kernels_ext_npu
from tests.support.programs import checks, rows
from tests.support.programs.registry import ACTS
from tests.support.programs.side import Shown, Side

DECODING = ("generate", "decode_some_tokens")
# what ours refuse, with sentences of docs/troubleshooting.md, by act; nothing has changed then
DOCUMENTED: dict[str, str] = {
    # who names ours, with a layer that is there twice, and keeps two rows of keys for each token; others have sdpa then
    **dict.fromkeys(DECODING, "attention_mask is for"),
    # of a copy, or of what was loaded, once kernels are unregistered
    "call": "(npu_grouped_mm. is not a valid experts|npu_flash_attention. is not a valid attention) implementation",
    "go_backward_from_kept_outputs": "_backward: .* of dtypes",  # a weight was cast in between
}


class Program:
    """Does each act to a kernelized model on the NPU and to its twin on the CPU, and compares them."""

    def __init__(self, variant: str, folder: Path, kernels: bool = True) -> None:
        self.variant, self.folder = variant, folder
        self.done: list[tuple[Any, ...]] = []
        self.is_over = False
        self.is_clear = True
        self.truth: checks.Computed | None = None  # of the twin, until an act does something to it
        self.twin = Side(variant, "cpu", False, folder / "twin")
        self.model = Side(variant, "npu", True, folder / "model")
        for side in (self.twin, self.model):
            side.folder.mkdir(parents=True, exist_ok=True)
        if kernels:
            kernels_ext_npu.kernelize(self.model.model)

    def possible(self) -> list[str]:
        """Return the acts that make sense now."""
        return [name for name, act in ACTS.items() if act.applies(self.twin) and act.applies(self.model)]

    def do(self, name: str, seed: int, *words: Any) -> None:
        """Do one act to both sides, with what the seed chooses or words say, and check what holds after every act.

        Raises:
            AssertionError: something does not hold.
        """
        act = ACTS[name]
        if act.computes or not act.is_ours:
            self.truth = None
        before = (checks.values(self.model), checks.values(self.twin)) if act.computes else None
        self._on_sides(name, lambda side: act.do(side, seed, *words), self.twin, self.model)
        self.done.append((name, seed, *words))
        if not self.is_over:
            self.check(seed, before)

    def _on_sides(self, name: str, what: Callable[[Side], Any], *sides: Side) -> dict[str, Any] | None:
        """Do something to sides, and return what it gives by their homes; None where one refuses, as it may."""
        found: dict[str, Any] = {}
        refused: dict[str, Exception] = {}
        for side in sides:
            with side.by_original_functions():
                try:
                    found[side.home] = what(side)
                except Exception as error:
                    refused[side.home] = error
        if not refused:
            return found
        judge(self, name, what, refused)
        return None

    def check(self, seed: int = 0, before: tuple[Any, Any] | None = None) -> None:
        """Compare the two sides.

        Args:
            seed: chooses what is looked at where all would be too much.
            before: the weights of both before an optimizer changed them, None if none did; the twin takes those of the
                other side once they have been compared.
        """
        found, expected = self.model, self.twin
        stepped = before is not None and before[1].keys() == checks.values(expected).keys()
        if checks.assert_equal_members(found, expected, values=not stepped):
            checks.follow(found, expected)  # a cast to fewer bits would make more of it
            self.truth = None
        checks.assert_equal_aliases(found, expected)
        limit = checks.tolerance(expected)
        if before is not None:
            if stepped and self.is_clear:
                self._compare_steps(before, limit)
            checks.follow(found, expected)
        if not self._compare_calls(limit):
            return
        report, has_looked = rows.look_again(found, seed)
        if has_looked and not self._compare_calls(limit):
            return
        rows.assert_report_is_true(report, found, seed)
        self._compare_shown(before[1] if before else None)
        if expected.has_steps:
            checks.follow(found, expected)

    def _compare_calls(self, limit: float) -> bool:
        """Call both models, and compare what they compute; return whether the program goes on."""
        is_known = self.truth is not None and not self.twin.has_steps
        sides = (self.model,) if is_known else (self.model, self.twin)
        called = self._on_sides("call", partial(checks.computed, margin=16 * limit), *sides)
        if called is None:
            self.is_over = True  # there is nothing to compare
            return False
        result, truth = called["npu"], called.get("cpu", self.truth)
        self.truth, self.is_clear = truth, truth.is_clear
        if not (truth.are_numbers and result.are_numbers):
            self._end_without_numbers(result, truth)
            return False
        if truth.is_clear:
            self._compare_computed(result, truth, limit)
        return True

    def _compare_computed(self, result: checks.Computed, truth: checks.Computed, limit: float) -> None:
        """Compare what both compute, and with float64 where rounding may have set them apart."""
        try:
            checks.assert_equal_computed(result, truth, limit)
        except AssertionError:
            with self.twin.by_original_functions():
                exact, others = checks.in_float64(self.twin), [truth, *checks.rounded_otherwise(self.twin)]
            if exact is None or not checks.is_as_near(result, others, exact, limit):
                raise

    def _compare_steps(self, before: tuple[checks.Values, checks.Values], limit: float) -> None:
        """Compare what an optimizer has changed, and with float64 where rounding may have set the sides apart."""
        found, expected = checks.values(self.model), checks.values(self.twin)
        dtypes = {name: tensor.dtype for name, tensor in self.twin.tensors().items()}
        apart = checks.steps(found, expected, before, dtypes)
        if apart.are_equal(limit):
            return
        repeated = self._repeated_in_float64(before[1]) if limit == checks.TOLERANCES[torch.float32] else None
        assert repeated is not None, "what weights have changed by"
        exact, _ = repeated
        ours = checks.steps(found, exact, before, dtypes)
        theirs = checks.steps(expected, exact, (before[1], before[1]), dtypes)
        assert ours.are_equal(limit) or ours.apart <= 4 * theirs.apart, "what weights have changed by"

    def _repeated_in_float64(self, before: checks.Values | None) -> tuple[checks.Values, list[Shown]] | None:
        """Do the last act once more to a copy of the twin in float64, from weights of before if they are given.

        Returns:
            The weights after it, and what it showed; None where it cannot be repeated.
        """
        twin, (name, *given) = self.twin, self.done[-1]
        if twin.has_steps:
            return None
        model, shown, held = twin.model, twin.shown, twin.held
        try:
            twin.model, twin.shown = checks.copied(model).double(), []
            twin.held = {}  # what is held is in its own dtype
            with torch.no_grad():
                for key, tensor in twin.tensors().items() if before else ():
                    if key in before:
                        tensor.copy_(before[key])
            with twin.by_original_functions():
                ACTS[name].do(twin, *given)
            return checks.values(twin), twin.shown
        except Exception:  # of whatever a user has put into it
            return None
        finally:
            twin.model, twin.shown, twin.held = model, shown, held

    def _end_without_numbers(self, result: checks.Computed, truth: checks.Computed) -> None:
        """A weight of zeros was divided by its norm, of which torch's attention on the CPU alone makes zeros.

        Or a norm of zeros has multiplied a gradient beyond what half precision holds; one launch may be spared that.
        """
        self.is_over = True
        if not truth.logits.isfinite().all():
            assert not result.logits.isfinite().all(), "logits of what is no number"
        elif truth.are_numbers:
            numbers: list[bool] = []
            on_a_plain_npu(self, lambda side: numbers.append(checks.computed(side, 0.0).are_numbers))
            assert numbers == [False], "logits or gradients are no numbers"

    def close(self) -> None:
        """Leave the process as it was."""
        kernels_ext_npu.unregister()
        for side in (self.model, self.twin):
            side.close()

    def _compare_shown(self, before: checks.Values | None) -> None:
        """Compare what the last act has computed, and with float64 where rounding may have set the sides apart."""
        shown = self.model.shown, self.twin.shown
        self.model.shown, self.twin.shown = [], []
        assert len(shown[0]) == len(shown[1])
        for index, ((found, dtype, roundings), (expected, *_)) in enumerate(zip(*shown)):
            limit = roundings * max(checks.TOLERANCES[dtype], checks.tolerance(self.twin))
            if not self.is_clear or (dtype != torch.float32 and self.model.is_experts):
                continue
            # T5 scales no scores: in 16 bits float64 alone tells who is off, and one of both may be near it by luck
            is_coarse = self.variant == "relative positions" and checks.tolerance(self.twin) > 1e-3
            apart = checks.distance(found, expected)
            repeated = self._repeated_in_float64(before) if apart > limit else None
            if repeated is not None:
                exact, times = repeated[1][index].tensor, 8 if is_coarse else 4
                apart, limit = checks.distance(found, exact), max(limit, times * checks.distance(expected, exact))
            assert apart <= limit or (repeated is None and is_coarse), "what the act has computed"


# ---- what a side may refuse: what both do, a plain model on the NPU does too, or a sentence of ours says -------------
def judge(program: Program, name: str, what: Callable[[Side], Any], refused: dict[str, Exception]) -> None:
    """Accept a refusal and let go of it, or raise it. After one that is not the same for both the program is over.

    What each side raised is taken out, since it keeps what was computed until then.
    """
    error = refused.pop("npu", None)
    twin_result = type(refused.pop("cpu", None))
    if error is None:  # the twin alone: the device can do more than the CPU, or the model more than a plain one
        program.is_over = True
        return
    if type(error) is twin_result:
        return
    if name in DOCUMENTED and re.search(DOCUMENTED[name], str(error)):
        program.is_over = name == "call"
        program.model.shown, program.twin.shown = [], []
        return
    program.is_over = True
    if on_a_plain_npu(program, what) is None:
        raise error


def on_a_plain_npu(program: Program, what: Callable[[Side], object]) -> Exception | None:
    """Live through a program once more without kernels on the NPU, do something there, and return what it raises."""
    kernels_ext_npu.unregister()
    side = Side(program.variant, "npu", False, program.folder / "plain")
    side.folder.mkdir(exist_ok=True)
    try:
        for done, *given in program.done:
            with suppress(Exception):  # a refusal that was accepted
                ACTS[done].do(side, *given)
        what(side)
    except Exception as error:
        return error
    else:
        return None
    finally:
        side.close()
