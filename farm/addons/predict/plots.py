"""Draws estimates over a size, and the errors of predictors, as image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.addons.pages import COLOURS, GREY, SHADE
from farm.addons.pages.plots import check_path, label_logs, new_figure, save_figure
from farm.addons.predict.dataset import Dataset
from farm.addons.predict.estimate import Estimate
from farm.addons.predict.evaluation import HeldOutPredictions
from farm.types.format import percent

if TYPE_CHECKING:
    from farm.addons.predict.regressors import Floats, Names


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
    measured_us = np.array([row.cost.time_us.value for row in data.rows])[finite]
    predicted_us = held.costs.time_us[finite]
    kinds = np.array([call.operator_family for call in data.calls])[finite]
    families = errors.families[finite]
    errors_percent = np.clip(100 * np.expm1(errors.log_ratio[finite]), -100, 200)

    height = max(5, 0.17 * len(set(families)) + 1)
    figure, (left, right) = new_figure(11, height, 1, 2)
    _draw_calls(left, measured_us, predicted_us, kinds)
    _draw_errors(right, errors_percent, families)
    right.set(xlabel=f"error of the predicted time (%), {held_out}")
    save_figure(figure, path, title)


def _draw_calls(axis: Any, measured_us: Floats, predicted_us: Floats, kinds: Names) -> None:
    """Draw a point for each call, in the colour of its operator family."""
    import numpy as np

    times_us = np.concatenate([measured_us, predicted_us])
    ends_us = [times_us.min(), times_us.max()]
    axis.plot(ends_us, ends_us, color=GREY, linewidth=1)

    names, numbers = np.unique(kinds, return_counts=True)
    most = sorted(names[np.argsort(-numbers)][: len(COLOURS)])
    colour_of = dict(zip(most, COLOURS, strict=False))
    shown = np.where(np.isin(kinds, most), kinds, "others")
    for name in [*most, "others"]:
        chosen = shown == name
        if chosen.any():
            style = {"color": colour_of.get(name, GREY), "markersize": 4, "label": name}
            axis.plot(measured_us[chosen], predicted_us[chosen], ".", **style)
    axis.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
    label_logs(axis.xaxis, axis.yaxis)
    axis.legend(fontsize=8, frameon=False)


def _draw_errors(axis: Any, errors_percent: Floats, families: Names) -> None:
    """Draw a box for the errors of each family of models, in alphabetic order from the top."""
    names = sorted(set(families), reverse=True)
    axis.axvspan(-10, 10, color=SHADE, zorder=0)
    axis.boxplot(
        [errors_percent[families == name] for name in names],
        tick_labels=names,
        orientation="horizontal",
        showfliers=False,
        medianprops={"color": COLOURS[0]},
    )
    axis.tick_params(axis="y", labelsize=8)


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
