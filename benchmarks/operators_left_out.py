"""Leave groups of operators out of a predictor's training data: coverage and width of their 90 %
intervals.

    python benchmarks/operators_left_out.py [--card H200] [GROUP]...

A family of models that is left out (`farm predict evaluate`) shares operators with the others. A
left-out group of operators has no such counterpart: all its calls are far from the readings. Each
group is predicted by `best`, trained without it, with the calibration of the stored predictor.
Output: for each group the number of tuples, the median distance from the readings, and for time and
power the coverage in % and the median half-width as a factor. The last columns count the tuples
that took at least twice the predicted time, and those of them inside the interval."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np

from cli.output import first_that_knows
from farm.addons.predict import query, stored_predictor
from farm.addons.predict.calibration import Calibration
from farm.addons.predict.call_features import CallDescription
from farm.addons.predict.dataset import Dataset, without_values
from farm.addons.predict.predictors import PREDICTORS, PredictorSpec

Group = Callable[[CallDescription], bool]


def _convolves(call: CallDescription, groups: float = 1) -> bool:
    return "convolution" in call.operator_family and (call.products or 1) >= groups


GROUPS: Mapping[str, Group] = {
    "grouped convolutions": lambda call: _convolves(call, groups=2),
    "grouped convolutions, float32": lambda call: (
        _convolves(call, groups=2) and call.dtype == "float32"
    ),
    "depthwise convolutions": lambda call: (
        _convolves(call, groups=2) and call.products == call.channels_in
    ),
    "convolutions, bfloat16": lambda call: _convolves(call) and call.dtype == "bfloat16",
    "convolutions, windows of one pixel": lambda call: _convolves(call) and call.window == 1,
    "convolutions, backward": lambda call: call.operator_type == "convolution_backward",
    "attention": lambda call: call.operator_family.startswith("attention"),
    "products, bfloat16": lambda call: (
        call.operator_family == "product" and call.dtype == "bfloat16"
    ),
    "products, float32": lambda call: call.operator_family == "product" and call.dtype == "float32",
    "pointwise, float32": lambda call: (
        call.operator_family == "pointwise" and call.dtype == "float32"
    ),
    "add": lambda call: call.operator_type == "add",
    "cat": lambda call: call.operator_type == "cat",
    "batch norm": lambda call: call.operator_type == "batchnorm2d",
    "row norm": lambda call: call.operator_family == "row norm",
    "pooling": lambda call: call.operator_family == "pooling",
    "indexing": lambda call: call.operator_family == "indexing",
    "tile roofline above 100 us": lambda call: call.tile_roofline_us > 100,
}


def left_out(
    spec: PredictorSpec, data: Dataset, belongs: Group, calibration: Calibration
) -> dict[str, float]:
    """Return the columns of one group; coverage is a share, a width is a factor."""
    group = data.where(map(belongs, data.calls))
    costs = spec.fit(data.without(call.operator_id for call in group.calls)).predict(
        without_values(group)
    )
    found = {"tuples": float(len(group)), "distance": float(np.median(costs.distance))}
    values_of = {
        "time_us": [row.cost.time_us.value for row in group.rows],
        "power_w": [row.cost.mean_power_w for row in group.rows],
    }
    for name, target in (("time", "time_us"), ("power", "power_w")):
        measured = np.array(values_of[target], dtype=float)
        errors = np.log(measured / getattr(costs, target))
        widths, has = (
            calibration.half_widths(name, getattr(costs, f"{name}_spread"), costs.known),
            np.isfinite(errors),
        )
        inside = np.abs(errors) <= widths
        found |= {
            f"{name}_covered": float(inside[has].mean()),
            f"{name}_width": float(np.exp(np.median(widths[has]))),
        }
        if name == "time":
            slow = errors >= np.log(2)
            found |= {
                "twice_as_slow": float(slow.sum()),
                "of_these_inside": float((slow & inside).sum()),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all groups")
    parser.add_argument("--card", default="H200")
    given = parser.parse_args()
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(
            f"There is no group {', '.join(sorted(unknown))}. Groups: {'; '.join(GROUPS)}."
        )
    data, _ = first_that_knows(
        lambda session: query.training_set(session, given.card, ""), lambda _: True
    )
    software = data.conditions.software
    stored = stored_predictor.find(stored_predictor.folders(), data.card.model, software.torch)
    if not isinstance(stored, stored_predictor.StoredPredictor):
        parser.error(
            f"No predictor is stored for {data.card.model}. Fit one: `farm predict fit --card "
            f"{given.card}`."
        )
    print(f"{data.card.model}, torch {software.torch}, {len(data)} tuples")
    for name in given.groups or GROUPS:
        found = left_out(PREDICTORS["best"], data, GROUPS[name], stored.calibration)
        print(
            name,
            *(f"{column} {value:.3g}" for column, value in found.items()),
            sep=", ",
            flush=True,
        )


if __name__ == "__main__":
    main()
