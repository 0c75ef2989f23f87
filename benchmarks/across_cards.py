"""Predictions across cards: choose the tuples that calibrate them, and evaluate them on the
packaged readings.

    python benchmarks/across_cards.py choose    # writes farm/data/calibration.json
    python benchmarks/across_cards.py develop   # families of the list, one left out in turn
    python benchmarks/across_cards.py evaluate  # errors for all other families
    python benchmarks/across_cards.py offset    # power of single H200s, with 30 readings of each

The list and the constants of `farm.addons.predict.transfer` use readings of `LIST_FAMILIES` alone.
The evaluation predicts tuples and whole models of the other families."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
from sqlmodel import Session

from farm.addons.predict.calibration import SUM_FLOOR, Calibration, PredictionErrors, coverage
from farm.addons.predict.dataset import (
    Dataset,
    MeasuredModel,
    datasets,
    families_of,
    measured_models,
    stored_card_rates,
    stored_specs,
)
from farm.addons.predict.predictors import PREDICTORS, CallCosts
from farm.addons.predict.stored_predictor import StoredPredictor
from farm.addons.predict.transfer import (
    POWER,
    TIME,
    WIDTHS,
    Points,
    SourceCosts,
    TransferredPredictor,
)
from farm.exchange.packaged import FOLDER, packaged_database
from farm.subjects.sweep import packaged_tuples
from farm.types.figure import value_of
from farm.types.request import CALIBRATION

CARDS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
#: The families of models from which calibration tuples are taken.
LIST_FAMILIES = ("bert", "llama", "resnet", "visformer", "vit")
LIST, MOST = 30, 100
MOST_US, MOST_BYTES = 2000.0, 1 << 30  # of one call of a calibration tuple
NUMBERS = (0, 10, 30, 100)
LEAST_OF_CARD = 60  # readings of a card whose offset is evaluated
LEAST_MEASURED = 0.75  # share of the tuples of a model that both cards have readings of

#: Target -> its column in the tables.
SUMS = {"sum time": "time of a sum", "sum energy": "energy of a sum"}
COLUMNS = {
    "time_us": "time of a tuple",
    "power_w": "power of a tuple",
    "energy_mj": "energy of a tuple",
    **SUMS,
}

#: Target -> its measured value in a row of a data set.
VALUES = {
    "time_us": lambda row: row.cost.time_us.value,
    "power_w": lambda row: row.cost.mean_power_w,
    "energy_mj": lambda row: value_of(row.cost.energy_mj),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """One card model: its readings by (tuple, class of data), and its models, all described for
    `card`.
    """

    data: Dataset
    models: list[MeasuredModel]

    @classmethod
    def of(cls, session: Session, model: str, described_for: str) -> Side:
        card = stored_card_rates(session, described_for)
        data = datasets(session, model, card)[0]
        return cls(data, measured_models(session, card, data.conditions))

    def ids_of(self, families: Sequence[str]) -> set[str]:
        return {
            id_
            for name, held in families_of(self.models).items()
            if name in families
            for id_ in held
        }


def chosen_order(session: Session) -> list[str]:
    """Return tuples measured on both cards in the order in which they reduce the posterior variance
    most.

    The variance is that of all tuples that the H200 has readings of, without those of the families
    of the evaluation, each weighted by the number of models that call it."""
    source, target = (Side.of(session, name, CARDS[0]) for name in CARDS)
    measured = {call.operator_id for call in target.data.calls}
    evaluated = {
        id_ for name, held in families_of(target.models).items() if name not in LIST_FAMILIES and held & measured
        for id_ in held
    }  # fmt: skip
    allowed = (measured & source.ids_of(LIST_FAMILIES)) - evaluated
    rows = [row for row in source.data.rows if row.call.operator_id not in evaluated]
    uses = Counter(id_ for model in source.models for id_ in model.operator_ids)
    data = dataclasses.replace(source.data, rows=tuple(rows))
    times, watts = (
        np.array(values, dtype=float)
        for values in (
            [row.cost.time_us.value for row in rows],
            [row.cost.mean_power_w or np.nan for row in rows],
        )
    )
    costs = dataclasses.replace(CallCosts.empty(len(rows)), time_us=times, power_w=watts)
    nobody = np.full(len(rows), "", dtype=np.str_)
    points = Points.of(data.card, data.calls, costs, nobody, nobody)
    weights = np.array([uses[row.call.operator_id] for row in rows], dtype=float)
    names = [row.call.operator_id for row in rows]
    candidates = [
        place for place, row in enumerate(rows)
        if row.call.operator_id in allowed and row.call.data_class == "normal" and not row.flags
        and row.cost.time_us.value <= MOST_US and max(row.call.bytes_moved, row.call.parameter_bytes) <= MOST_BYTES
    ]  # fmt: skip
    kernels = [(kernel, kernel.covariance(points, points)) for kernel in (TIME, POWER)]
    order: list[str] = []
    while len(order) < MOST:
        gains = np.zeros(len(candidates))
        for kernel, covariance in kernels:
            towards = covariance[:, candidates]
            gains += (weights[:, None] * towards**2).sum(axis=0) / (
                covariance[candidates, candidates] + kernel.noise**2
            )
        best = candidates.pop(int(np.argmax(gains)))
        order.append(names[best])
        for kernel, covariance in kernels:
            one = covariance[:, best].copy()
            covariance -= np.outer(one, one) / (one[best] + kernel.noise**2)
    return list(dict.fromkeys(order))


def choose(session: Session) -> None:
    order = chosen_order(session)[:LIST]
    specs = stored_specs(session, order)
    text = json.dumps([specs[id_].spec for id_ in order], separators=(",", ":")).replace(
        '{"kind"', '\n{"kind"'
    )
    (FOLDER / "calibration.json").write_text(text + "\n")


@dataclasses.dataclass
class Errors:
    """Errors of one method: log(predicted / measured) by target, with half-widths and families."""

    values: dict[str, list[tuple[float, float, str]]] = dataclasses.field(default_factory=dict)

    def add(
        self,
        target: str,
        predicted: np.ndarray,
        measured: np.ndarray,
        widths: np.ndarray,
        names: list[str],
    ):
        with np.errstate(invalid="ignore", divide="ignore"):
            errors = np.log(predicted / measured)
        entries = zip(errors.tolist(), widths.tolist(), names, strict=True)
        self.values.setdefault(target, []).extend(entries)

    def cell(self, target: str) -> str:
        errors, widths, names = zip(*self.values[target], strict=True)
        errors, widths = np.array(errors), np.array(widths)
        known = np.isfinite(errors)
        if not known.any():
            return "-"
        text = f"{100 * np.median(abs(np.expm1(errors[known]))):.1f}"
        of = PredictionErrors(errors, widths, np.array(names, dtype=np.str_), known)
        found = coverage(of, np.where(widths > 0, widths, np.nan))
        if found is None:
            return text
        inside = float((abs(errors) <= widths)[known].mean())
        # A family has only a few whole models.
        worst = "" if target in SUMS else f"{found.worst_family} {100 * found.worst:.0f}, "
        return f"{text} ({100 * inside:.0f}, {worst}{found.width:.2f})"


def predicted(costs: CallCosts, share: float, counts: np.ndarray) -> tuple[float, float]:
    times, energies = costs.in_model(share)
    return float(counts @ times), float(counts @ energies)


class Comparison:
    """Predictions of one card model from another by every method, with errors collected by
    method.
    """

    def __init__(self, session: Session, source: str, target: str, order: list[str]) -> None:
        self.session, self.order, self.names = session, order, (source, target)
        self.source, self.target = (
            Side.of(session, source, source),
            Side.of(session, target, source),
        )
        self.own = Side.of(session, target, target)
        self.card = self.own.data.card
        self.found: dict[str, Errors] = {}

    def predict(
        self, families: Sequence[str], list_families: Sequence[str], read: bool, fitted
    ) -> None:
        """Add the errors of `families`. ``read``: the source has readings of their tuples."""
        wanted, listed = self.target.ids_of(families), self.target.ids_of(list_families)
        wanted = (wanted - listed) & {call.operator_id for call in self.source.data.calls}
        source_data = self.source.data if read else self.source.data.without(wanted)
        developing = fitted.name == "family"
        stored = StoredPredictor.of(source_data, fitted, SOURCE_WIDTHS)
        costs_of = SourceCosts(stored, lambda _: source_data.rows)
        rows = [row for row in self.target.data.rows if row.call.operator_id in wanted]
        family_of = {id_: name for name, held in families_of(self.target.models).items() if name in families
                     for id_ in held}  # fmt: skip
        calls = [row.call for row in rows]
        names = [family_of[call.operator_id] for call in calls]
        own_rows = {(row.call.operator_id, row.call.data_class): row for row in self.own.data.rows}
        measured = wanted | listed
        models = [
            one for one in self.target.models
            if one.family in families and one.cost
            and len(one.operator_ids & measured) >= LEAST_MEASURED * len(one.operator_ids)
        ]  # fmt: skip
        own_models = {one.title: one for one in self.own.models}
        listed_rows: dict[str, list] = {}
        for row in self.target.data.rows:
            if row.call.data_class == "normal":
                listed_rows.setdefault(row.call.operator_id, []).append(row)

        def add(method: str, predict, own: bool = False) -> None:
            errors = self.found.setdefault(method, Errors())
            calls_of = (
                [own_rows[row.call.operator_id, row.call.data_class].call for row in rows]
                if own
                else calls
            )
            found = predict(calls_of)
            for target, spread in (("time_us", "time_spread"), ("power_w", "power_spread"),
                                   ("energy_mj", "energy_spread")):  # fmt: skip
                measured = np.array([VALUES[target](row) or np.nan for row in rows], dtype=float)
                errors.add(target, getattr(found, target), measured, getattr(found, spread), names)
            for model in models:
                of = own_models[model.title] if own else model
                costs, counts = predict(of.calls), np.array(of.counts, dtype=float)
                time_us, energy_mj = predicted(costs, of.cached_share, counts)
                total = costs.sum(of.calls, of.counts, of.cached_share)
                wide = WIDTHS.sum_time * np.array([total.time_spread, total.energy_spread])
                for name, value, width, whole in (
                    ("sum time", time_us, wide[0], model.cost and model.cost.time_us.value),
                    (
                        "sum energy",
                        energy_mj,
                        wide[1],
                        model.cost and value_of(model.cost.energy_mj),
                    ),
                ):
                    errors.add(
                        name,
                        np.array([value]),
                        np.array([whole or np.nan]),
                        np.array([width if total.time_spread > SUM_FLOOR else 0.0]),
                        [model.family],
                    )
                    if VERBOSE and method.startswith("transfer"):
                        error = 100 * (value / whole - 1) if whole else np.nan
                        print(f"    {method:26s} {model.title:60s} {name} {error:+.1f} %")

        def same(calls_of):
            costs = costs_of.at(calls_of)[0]
            nothing = np.zeros(len(calls_of))
            return dataclasses.replace(costs, time_spread=nothing, power_spread=nothing)

        def ratio(calls_of):
            costs = same(calls_of)
            source = self.source.data.card
            factors = np.array([
                self.card.roofline(call.dtype).estimate_us(call.flops, call.bytes_moved)
                / source.roofline(call.dtype).estimate_us(call.flops, call.bytes_moved) for call in calls_of
            ])  # fmt: skip
            return dataclasses.replace(costs, time_us=costs.time_us * factors)

        add("same as the source", same)
        add("ratio of rooflines", ratio)
        allowed = [id_ for id_ in self.order if id_ in listed and id_ not in wanted]
        for number in NUMBERS:
            used = [row for id_ in allowed[:number] for row in listed_rows.get(id_, [])]
            add(
                f"transfer, {len(used) if VERBOSE else number} tuples",
                TransferredPredictor.fit(costs_of, self.card, used).costs,
            )
            if number >= 30 and not developing:
                ids = {row.call.operator_id for row in used}
                alone = self.own.data.where(
                    call.operator_id in ids and call.data_class == "normal"
                    for call in self.own.data.calls
                )
                model = PREDICTORS["best"].fit(alone)
                add(
                    f"target alone, {number} tuples",
                    lambda some, model=model: dataclasses.replace(
                        model.predict(some),
                        time_spread=np.zeros(len(some)),
                        power_spread=np.zeros(len(some)),
                    ),
                    own=True,
                )

    def show(self, title: str) -> None:
        print(f"\n{title}: {self.names[0]} -> {self.names[1]}")
        print(
            "| method | " + " | ".join(COLUMNS.values()) + " |\n|" + " --- |" * (len(COLUMNS) + 1)
        )
        for method, errors in self.found.items():
            print(f"| {method} | " + " | ".join(map(errors.cell, COLUMNS)) + " |")
        counts = {
            name: len(values) for name, values in next(iter(self.found.values())).values.items()
        }
        print(counts, flush=True)


def offsets(session: Session) -> None:
    """Predict the power of each H200 from other H200s, for every second card; the others were used
    to choose `ALIKE`.

    No reading of the card's tuples is in the predictor, but their readings on other cards are the
    source."""
    data = Side.of(session, CARDS[0], CARDS[0]).data
    count = Counter(row.card_id for row in data.rows)
    random = np.random.default_rng(0)
    cards = [name for name, number in count.most_common() if number >= LEAST_OF_CARD][1::2]
    errors: dict[str, list[np.ndarray]] = {
        "any card of the model": [],
        "corrected with 30 readings": [],
    }
    inside: list[np.ndarray] = []
    for name in cards:
        own = [row for row in data.rows if row.card_id == name]
        others = data.where(row.card_id != name for row in data.rows)
        rest = others.without(row.call.operator_id for row in own)
        stored = StoredPredictor.of(rest, PREDICTORS["best"].fit(rest), SOURCE_WIDTHS)
        costs_of = SourceCosts(stored, lambda _, rows=others.rows: rows)
        order = random.permutation(len(own))
        used, tested = ([own[place] for place in places] for places in (order[:LIST], order[LIST:]))
        calls, watts = (
            [row.call for row in tested],
            np.array([row.cost.mean_power_w or np.nan for row in tested]),
        )
        corrected = TransferredPredictor.fit(costs_of, data.card, used, name).costs(calls)
        for found, costs in zip(errors.values(), (costs_of.at(calls)[0], corrected), strict=True):
            found.append(np.log(costs.power_w / watts))
        inside.append(abs(found[-1]) <= corrected.power_spread)
    for method, found in errors.items():
        biases = [100 * abs(np.nanmedian(one)) for one in found]
        each = 100 * np.nanmedian(abs(np.concatenate(found)))
        text = f"{len(cards)} cards, {method}: median of a tuple {each:.2f} %, "
        print(
            text
            + f"offset of a card {np.median(biases):.2f} % in the median, {max(biases):.2f} % at most"
        )
    print(f"inside the interval: {100 * np.concatenate(inside).mean():.0f} %")


#: 1.4 times the calibration of the packaged predictor (1.2 for power): the data sets of these
#: comparisons are smaller.
SOURCE_WIDTHS = Calibration(1.2, 1.5, 1.2, 3.0, 3.0, 3.0)
VERBOSE = "-v" in sys.argv


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("choose", "develop", "evaluate", "offset"))
    parser.add_argument("-v", action="store_true", help="print the error of each sum")
    action = parser.parse_args().action
    database = packaged_database()
    with database.read() as session:
        if action == "choose":
            choose(session)
            return
        if action == "offset":
            offsets(session)
            return
        listed = [packaged.spec.id for packaged in packaged_tuples(CALIBRATION)]
        order = list(dict.fromkeys([*listed, *chosen_order(session)]))[:MOST]
        for source, target in (CARDS, CARDS[::-1]):
            fitted = None
            for read in (True, False):
                one = Comparison(session, source, target, order)
                if action == "develop":
                    if not read:
                        continue
                    fitted = PREDICTORS["roofline"].fit(one.source.data)
                    for family in LIST_FAMILIES:
                        one.predict(
                            [family],
                            [name for name in LIST_FAMILIES if name != family],
                            read,
                            fitted,
                        )
                else:
                    others = [
                        name for name in families_of(one.target.models) if name not in LIST_FAMILIES
                    ]
                    left_out = one.target.ids_of(others) - one.target.ids_of(LIST_FAMILIES)
                    fitted = fitted or PREDICTORS["best"].fit(one.source.data.without(left_out))
                    one.predict(others, LIST_FAMILIES, read, fitted)
                one.show(
                    "tuples measured on the source"
                    if read
                    else "families without a reading of the source"
                )


if __name__ == "__main__":
    main()
