"""Draws estimates over a size, and the errors of predictors, as image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farm.addons.pages import COLOURS, GREY, SHADE
from farm.addons.pages.plots import check_path, label_logs, new_figure, save_figure
from farm.addons.predict.dataset import Dataset
from farm.addons.predict.estimate import Estimate
from farm.addons.predict.evaluation import HeldOutPredictions
from farm.types.format import percent


def draw_evaluation(
    data: Dataset, held: HeldOutPredictions, path: Path, title: str, held_out: str
) -> None:
    """Draw predicted against measured time by operator family, and the errors of each family of
    models. ``held_out``: what the predictor did not learn from. Raises `UsageError` if the file
    cannot be drawn (`check_path`)."""
    check_path(path)
    import numpy as np

    errors = held.errors(data)["time"]
    finite = np.isfinite(errors.log_ratio)
    measured = np.array([row.cost.time_us.value for row in data.rows])[finite]
    predicted = held.costs.time_us[finite]
    off_percent = 100 * np.expm1(errors.log_ratio[finite])
    kinds = np.array([call.operator_family for call in data.calls])[finite]
    families = sorted(set(errors.families[finite]), reverse=True)  # from bottom to top
    figure, (left, right) = new_figure(11, max(5, 0.17 * len(families) + 1), 1, 2)

    ends = [
        min(measured.min(), predicted.min()),
        max(measured.max(), predicted.max()),
    ]
    left.plot(ends, ends, color=GREY, linewidth=1)
    names, numbers = np.unique(kinds, return_counts=True)
    most = sorted(names[np.argsort(-numbers)][: len(COLOURS)])
    groups = [(name, colour, kinds == name) for name, colour in zip(most, COLOURS, strict=False)]
    groups.append(("others", GREY, np.isin(kinds, most, invert=True)))
    for name, colour, chosen in groups:
        if chosen.any():
            style = {"color": colour, "markersize": 4, "label": name}
            left.plot(measured[chosen], predicted[chosen], ".", **style)
    left.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
    label_logs(left.xaxis, left.yaxis)
    left.legend(fontsize=8, frameon=False)

    of_families = [
        np.clip(off_percent[errors.families[finite] == name], -100, 200) for name in families
    ]
    right.axvspan(-10, 10, color=SHADE, zorder=0)
    right.boxplot(
        of_families,
        tick_labels=families,
        orientation="horizontal",
        showfliers=False,
        medianprops={"color": COLOURS[0]},
    )
    right.tick_params(axis="y", labelsize=8)
    right.set(xlabel=f"error of the predicted time (%), {held_out}")
    save_figure(figure, path, title)


def draw_estimates(estimates: Sequence[Estimate], path: Path, over: str) -> None:
    """Draw a model's time over a size (``batch`` or ``length``), with its interval. Raises as
    `check_path`.
    """
    check_path(path)
    level = min(estimate.level for estimate in estimates)
    sizes, times_ms, lows_ms, highs_ms = [], [], [], []
    for estimate in estimates:
        variant, time = estimate.variant, estimate.time_at(level)
        sizes.append(variant.batch if over == "batch" else variant.length)
        times_ms.append(time.value / 1e3)
        lows_ms.append((time.value if time.low is None else time.low) / 1e3)
        highs_ms.append((time.value if time.high is None else time.high) / 1e3)

    figure, (axis,) = new_figure(7, 4.5)
    label = f"{percent(level, 0)} interval"
    axis.fill_between(sizes, lows_ms, highs_ms, color=SHADE, label=label)
    axis.plot(sizes, times_ms, ".-", color=COLOURS[0], label="estimated time of the model")
    axis.set(xlabel=over, ylabel="time (ms)", xscale="log", yscale="log")
    label_logs(axis.yaxis)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.legend(frameon=False)
    save_figure(figure, path, f"{estimates[0].variant.model} on {estimates[0].card_model}")
