"""The picture of `inspect --plot`: it says the result, lengths are in proportion, and no text runs into another."""

from collections import Counter
from itertools import combinations

import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from transformers import AutoConfig, Qwen3ForCausalLM

from kernels_ext_npu.inspection import picture
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.inspecting import ALL, ORIGINAL, UPDATE, Inspection, KernelSet
from kernels_ext_npu.inspection.mesh import ONE
from kernels_ext_npu.inspection.subject import Subject
from kernels_ext_npu.measuring.roofline import SOCS
from kernels_ext_npu.reporting.report import Report

LAUNCHES = {"mm": (36_864, 0), "mul": (2_653, 1), "_sum": (578, 48), "copy": (36, 36), "npu_grouped_matmul": (0, 288)}
LAUNCHES |= {"npu_fused_linear_cross_entropy_loss_with_max_sum_backward": (900, 900)}  # the longest name
GIGABYTES = {"mm": (312.4, 0.0), "mul": (189.0, 0.3), "_sum": (24.1, 0.004), "copy": (18.7, 18.7), "tiny": (1e-9, 0.0)}
OTHERS = {f"other{i}": (3, 2) for i in range(20)}
PEAKS, OPTIMIZER = (48, 22), 61


def inspection(with_update: bool = False, with_step: bool = True) -> Inspection:
    kernel_sets = [KernelSet(ORIGINAL), KernelSet(ALL)]
    for which, kernel_set in enumerate(kernel_sets):
        launches = Counter({name: pair[which] for name, pair in (LAUNCHES | OTHERS).items()})
        moved = Counter({name: round(pair[which] * 1e9) for name, pair in GIGABYTES.items()})
        counts = Counts(launches=launches, bytes=moved, waits=9 * (1 - which), peak=PEAKS[which] * 10**9)
        kernel_set.counts = {"forward": counts, "step": counts if with_step else None}
        if with_update:
            for phase, peak in zip(UPDATE, (1, OPTIMIZER)):
                kernel_set.counts[phase] = Counts(
                    launches=Counter({"add": 4}), bytes=Counter({"add": 7 * 10**9}), peak=peak * 10**9
                )
    subject = Subject("tiny", AutoConfig.for_model("qwen3"), Qwen3ForCausalLM, [])
    mesh, soc = ONE, SOCS["910b3"]
    return Inspection(subject, "1 × 8 tokens", "bfloat16", soc, mesh, 1, 2, Report([]), kernel_sets, [])


@pytest.fixture(scope="module", params=[False, True], ids=["step", "whole step"])
def figure(request):
    figure = picture.draw(inspection(request.param))
    figure.canvas.draw()
    yield figure
    plt.close(figure)


def bars(axes: Axes) -> list[tuple[float, float]]:
    """The lengths of the bars of a panel, original and with kernels, from the top."""
    found = sorted((p for p in axes.patches if isinstance(p, Rectangle)), key=lambda bar: -bar.get_y())
    lengths = [bar.get_width() for bar in found]
    return list(zip(lengths[::2], lengths[1::2]))


def test_the_title_says_the_result(figure) -> None:
    launches = [sum(pair[which] for pair in (LAUNCHES | OTHERS).values()) for which in (0, 1)]
    moved = [sum(pair[which] for pair in GIGABYTES.values()) for which in (0, 1)]
    factors = launches[0] / launches[1], moved[0] / moved[1], PEAKS[0] / PEAKS[1]
    one, two, three = (f"{factor:.0f}" if factor > 10 else f"{factor:.1f}" for factor in factors)
    said = f"{one} × fewer launches, {two} × fewer bytes moved, {three} × less memory at the peak"
    texts = [text.get_text() for text in figure.texts]
    assert "tiny, a training step with kernels:" in texts
    assert said in texts
    assert any("waits 9 → 0 times" in text for text in texts)


def test_the_title_names_what_grows_and_leaves_out_what_stays() -> None:
    more = [Counts(launches=Counter({"mm": number}), bytes=Counter({"mm": 7}), peak=5) for number in (10, 15)]
    assert picture.result(*more) == "1.5 × more launches"
    assert picture.result(more[0], more[0]) == "nothing changes"


def test_lengths_begin_at_zero_are_in_proportion_and_have_their_figures(figure) -> None:
    for axes in figure.axes:
        assert axes.get_xscale() == "linear"
        assert axes.get_xlim()[0] == 0
        assert all(patch.get_x() == 0 for patch in axes.patches)
    panels = {axes.get_title(): bars(axes) for axes in figure.axes}
    assert panels["peak GB beyond weights"][0] == PEAKS
    names = [label.get_text().replace("\n", "") for label in figure.axes[-2].get_yticklabels()]
    operators = dict(zip(names, panels["launches by operator"]))
    assert operators["mm"] == LAUNCHES["mm"]
    assert operators["sum"] == LAUNCHES["_sum"]
    assert operators["all others"] == (17 * 3, 17 * 2)  # of 26 operators nine have bars of their own
    *peaks, launches, moved = [{text.get_text() for text in axes.texts} for axes in figure.axes]
    assert {"36,864 → 0", "2,653 → 1", "578 → 48", "36 → 36", "0 → 288"} <= launches
    assert "24.1 → < 0.01" in moved
    assert {"48", "22"} <= set().union(*peaks)


def test_what_the_optimizer_adds_stands_apart_from_forward_and_backward() -> None:
    figure = picture.draw(inspection(with_update=True))
    figure.canvas.draw()
    peaks = next(axes for axes in figure.axes if "peak" in axes.get_title())
    assert bars(peaks) == [PEAKS, (OPTIMIZER, OPTIMIZER)]
    assert any("add 8 launches and 14 GB moved to both, and hold 61 GB" in text.get_text() for text in figure.texts)
    plt.close(figure)


def test_a_forward_is_drawn_where_no_step_was_counted() -> None:
    figure = picture.draw(inspection(with_step=False))
    assert any("a forward with kernels" in text.get_text() for text in figure.texts)
    plt.close(figure)


def test_no_text_leaves_the_picture_or_runs_into_another(figure) -> None:
    labels = [label for axes in figure.axes for label in (*axes.texts, axes.title, *axes.get_yticklabels())]
    boxes = [text.get_window_extent() for text in (*labels, *figure.texts) if text.get_text()]
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
