"""The picture of `inspect --plot`: what is counted is seen, also a thousandth of the largest."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from transformers import AutoConfig, Qwen3ForCausalLM

from kernels_ext_npu.inspection import plotting
from kernels_ext_npu.inspection.counts import Counts
from kernels_ext_npu.inspection.inspecting import ALL, ORIGINAL, WHOLE, Inspection, Variant
from kernels_ext_npu.inspection.mesh import ONE
from kernels_ext_npu.inspection.roofline import SOCS
from kernels_ext_npu.inspection.subject import Subject
from kernels_ext_npu.reporting.report import Report

LAUNCHES = {"mm": (36_864, 0), "mul": (2_653, 1), "_sum": (578, 48), "copy": (36, 36), "npu_grouped_matmul": (0, 288)}
GIGABYTES = {"mm": (312.4, 0.0), "mul": (189.0, 0.3), "_sum": (24.1, 0.004), "copy": (18.7, 18.7), "tiny": (1e-9, 0.0)}
OTHERS = {f"other{i}": (3, 2) for i in range(20)}


@pytest.fixture
def panels():
    """The two halves of a picture of these figures, as they come out of a file."""
    figure = plotting.draw(inspection())
    figure.canvas.draw()
    yield figure.axes
    plt.close(figure)


def inspection() -> Inspection:
    variants = [Variant(ORIGINAL), Variant(ALL)]
    for which, variant in enumerate(variants):
        launches = Counter({name: pair[which] for name, pair in (LAUNCHES | OTHERS).items()})
        moved = Counter({name: round(pair[which] * 1e9) for name, pair in GIGABYTES.items()})
        variant.counts = {"forward": Counts(), "step": Counts(launches=launches, bytes=moved)}
    subject = Subject("tiny", AutoConfig.for_model("qwen3"), Qwen3ForCausalLM, [])
    mesh, soc = ONE, SOCS["910b"]
    return Inspection(subject, "1 × 8 tokens", torch.bfloat16, soc, mesh, 1, 2, Report([]), variants, [])


def test_a_whole_step_has_its_phases_above_the_operators() -> None:
    """Each is drawn to scale, in the order of a step; the operators are those of all phases."""
    counted = inspection()
    for which, variant in enumerate(counted.variants):
        for place, phase in enumerate(WHOLE):
            number = (place + 1) * (2 - which)
            counts = Counts(Counter({"mm": number}), Counter({"mm": number * 10**9}), peak=number * 10**9)
            variant.counts[phase] = counts
    figure = plotting.draw(counted)
    figure.canvas.draw()
    above, below = figure.axes[:3], figure.axes[3:]
    assert [label.get_text() for label in above[0].get_yticklabels()] == list(WHOLE.values())
    for axes in above:
        assert axes.get_yticks().tolist() == above[0].get_yticks().tolist()
        for bars_of, factor in zip(bars(axes), (2, 1), strict=True):
            assert [bar.get_width() for bar in bars_of] == [factor * place for place in (1, 2, 3, 4)]
            assert [bar.get_y() for bar in bars_of] == sorted((bar.get_y() for bar in bars_of), reverse=True)
        assert Counter(text.get_text() for text in axes.texts) == Counter("24681234")
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in below]
    assert legends == [["original: 20", "with kernels: 10"]] * 2
    plt.close(figure)


def bars(axes: Axes) -> list[list[Rectangle]]:
    """Of the original, and with kernels, from the top."""
    return [list(container) for container in axes.containers]


def pixels(bar: Rectangle, axes: Axes) -> float:
    seen = bar.get_window_extent().intersection(bar.get_window_extent(), axes.get_window_extent())
    return seen.width if seen else 0.0


def test_every_count_has_a_bar_that_is_seen_and_zero_has_none(panels) -> None:
    for axes, figures in zip(panels, (LAUNCHES, GIGABYTES), strict=True):
        names = [label.get_text() for label in axes.get_yticklabels()]
        for which, found in enumerate(bars(axes)):
            for name, bar in zip(names, found, strict=True):
                count = dict(figures).get(name, figures.get(f"_{name}"))
                if count is not None:
                    assert (pixels(bar, axes) > 5) == (count[which] > 0), (name, which)


def test_a_thousandth_of_the_largest_is_a_fifth_of_its_length(panels) -> None:
    """36 of 36,864."""
    axes = panels[0]
    (largest, *_, rest), names = bars(axes)[0], [label.get_text() for label in axes.get_yticklabels()]
    thousandth = bars(axes)[0][names.index("copy")]
    assert pixels(thousandth, axes) > pixels(largest, axes) / 5
    assert pixels(rest, axes) > 0


def test_longer_bars_are_of_larger_counts_and_none_leaves_the_picture(panels) -> None:
    for axes, figures in zip(panels, (LAUNCHES, GIGABYTES), strict=True):
        names = [label.get_text() for label in axes.get_yticklabels()][:-1]
        lengths = {}
        for which, found in enumerate(bars(axes)):
            for name, bar in zip(names, found):
                count = (figures | OTHERS).get(name, figures.get(f"_{name}"))
                lengths[name, which] = (count[which], pixels(bar, axes))
                assert pixels(bar, axes) == pytest.approx(bar.get_window_extent().width)
        ordered = sorted(lengths.values())
        assert [length for _, length in ordered] == sorted(length for _, length in ordered)


def test_bars_are_labelled_with_their_counts_and_the_legend_has_the_sums(panels) -> None:
    launches, moved = panels
    texts = [[text.get_text() for text in axes.texts] for axes in panels]
    assert {"36,864", "2,653", "1", "578", "48", "36", "0", "288"} <= set(texts[0])
    assert {"312", "189", "0.30", "24.1", "18.7", "< 0.01", "0"} <= set(texts[1])
    assert [len(found) for found in texts] == [2 * len(axes.get_yticks()) for axes in panels]
    shown = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (launches, moved)]
    assert shown[0] == [f"original: {36_864 + 2_653 + 578 + 36 + 60:,}", f"with kernels: {1 + 48 + 36 + 288 + 40}"]
    assert shown[1] == ["original: 544", "with kernels: 19.0"]
    assert all("logarithmic" in axes.get_xlabel() for axes in panels)
    # what is not among the first twelve is one bar: 20 others, of which 12 - 5 are shown
    assert texts[0][12] == str(3 * 13)
