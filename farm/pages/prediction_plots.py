"""Predictions as pictures: predicted against measured, errors by family of models, and a model's cost along a size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from farm.pages.plots import COLOURS, INK, WINDOW, check_path
from farm.prediction.dataset import Dataset
from farm.prediction.evaluation import HeldOut


def draw_evaluation(data: Dataset, held: HeldOut, path: Path, title: str) -> None:
    """Predicted against measured time, both logarithmic, by operator family; beside it the errors of each family of models.

    Raises:
        UsageError: matplotlib is missing, or nothing can be written there.
    """
    check_path(path)
    from matplotlib.figure import Figure

    errors = held.errors(data, "time_us")
    asked = np.isfinite(errors.off)
    measured = np.array([row.time_us for row in data.rows])[asked]
    predicted, off = held.answers.time_us[asked], 100 * np.expm1(errors.off[asked])
    kinds = np.array([call.operator_family for call in data.calls])[asked]
    families = sorted(set(errors.families[asked]), reverse=True)  # from below
    figure = Figure(figsize=(11, max(5, 0.17 * len(families) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
    left.plot(ends, ends, color="#7f7f7f", linewidth=1)
    names, numbers = np.unique(kinds, return_counts=True)
    most = set(names[np.argsort(-numbers)][: len(COLOURS) - 1])
    for number, name in enumerate([*sorted(most), "others"]):
        chosen = np.isin(kinds, list(most), invert=True) if name == "others" else kinds == name
        if chosen.any():
            left.plot(measured[chosen], predicted[chosen], ".", color=COLOURS[number], markersize=4, label=name)
    left.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
    left.legend(fontsize=8, frameon=False)
    groups = [np.clip(off[errors.families[asked] == name], -100, 200) for name in families]
    right.axvspan(-10, 10, color=WINDOW, zorder=0)
    right.boxplot(groups, orientation="horizontal", tick_labels=families, showfliers=False, medianprops={"color": INK})
    right.tick_params(axis="y", labelsize=8)
    right.set(xlabel="error of the time (%), family left out")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def draw_curve(
    sizes: Sequence[int],
    values: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    path: Path,
    title: str,
    unit: str = "ms",
    name: str = "batch",
) -> None:
    """A model's time along a size, with its interval.

    Raises:
        UsageError: as of `draw_evaluation`.
    """
    check_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.fill_between(sizes, lows, highs, color=WINDOW, label="90 % interval")
    axis.plot(sizes, values, ".-", color=INK, label="readings and predictions")
    axis.set(xlabel=name, ylabel=f"time ({unit})", xscale="log", yscale="log", title=title)
    axis.set_xticks(list(sizes), [str(size) for size in sizes])
    axis.minorticks_off()
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
