"""Compares predicted compiled models with measured ones; a family of models is left out at a time.

    python -m benchmarks.compiled_estimates [--refit] [--lists FOLDER] [--write tables.md]

For each compiled variant with a reading of the whole model: the compiler lists its kernels without
a card, and the time and energy are predicted. All that is learned about compiled models is learned
from other families. No reading of a tuple is used. The calls of libraries are predicted by the
packaged predictor of eager models; with ``--refit`` by one that was fitted without the family, too
(30 s of a core each; it needs scikit-learn). The widths of their intervals are those of the
packaged predictor in both cases. ``--lists`` keeps the lists of kernels, which take the compiler 10
to 30 s of a core each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.addons.predict import stored_predictor
from farm.addons.predict.compiled_predictor import (
    CompiledPredictor,
    LibraryReading,
    is_kernel,
    library_factors,
    library_readings,
)
from farm.addons.predict.dataset import Dataset, datasets, families_of, measured_models
from farm.addons.predict.evaluation import Score
from farm.addons.predict.families import model_family
from farm.addons.predict.generated_kernels import (
    KernelReading,
    LearnedKernels,
    kernel_readings,
    without_family,
)
from farm.addons.predict.predictors import predictor_spec
from farm.addons.predict.stored_predictor import PredictedValue, StoredPredictor
from farm.exchange.packaged import packaged_database
from farm.store.columns import OF_WHOLES, VARIANT
from farm.store.content import stored_variant
from farm.store.reuse import sound_readings
from farm.training.foreseen_kernels import foreseen_kernels
from farm.types.data_sheets import data_sheet
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant


@dataclasses.dataclass(frozen=True)
class Compared:
    """A variant, predicted and measured."""

    variant: Variant
    kernels_us: float  # of the predicted time: generated kernels
    time_us: PredictedValue
    energy_mj: PredictedValue | None
    measured_us: float
    measured_mj: float | None

    @property
    def time_ratio(self) -> float:
        return self.time_us.value / self.measured_us

    @property
    def energy_ratio(self) -> float | None:
        if self.energy_mj is None or not self.measured_mj:
            return None
        return self.energy_mj.value / self.measured_mj


def compared(
    session: Session, card_model: str, lists: Path | None, *, refit: bool
) -> list[Compared]:
    """Predict and compare all compiled variants with a reading of the whole model."""
    stored = stored_predictor.find(stored_predictor.folders(), card_model)
    assert stored is not None, f"there is no predictor for {card_model}"
    data = next(one for one in datasets(session, card_model) if one.conditions == stored.conditions)
    members = families_of(measured_models(session, data.card, data.conditions))
    readings = kernel_readings(session, card_model), library_readings(session, card_model)
    predictors: dict[str, StoredPredictor] = {}
    results = []
    for variant, whole in _measured(session, card_model):
        family = model_family(variant.model)
        if family not in predictors and refit:
            _say(f"fitting without the family {family}")
            predictors[family] = _without(stored, data, members.get(family, set()))
        _say(f"compiling {variant}")
        needed = _kernels(variant, card_model, lists)
        operators = predictors.get(family, stored)
        results.append(_compared(variant, needed, operators, *readings, whole))
    return results


def _without(stored: StoredPredictor, data: Dataset, members: set[str]) -> StoredPredictor:
    fitted = predictor_spec(stored.name).fit(data.without(members))
    return dataclasses.replace(stored, fitted=fitted)


def _measured(session: Session, card_model: str) -> list[tuple[Variant, Any]]:
    """The compiled variants of a card model, with the newest reading of the whole model."""
    rows = session.execute(sqlalchemy.select(*VARIANT).where(VARIANT.compile != ""))
    variants = [stored_variant(row._asdict()) for row in rows]
    columns = ("subject_id", "time_us", "energy_mj", "flags")
    wholes = {
        row.subject_id: row for row in sound_readings(session, card_model, columns, OF_WHOLES)
    }
    return [
        (variant, wholes[variant.id])
        for variant in sorted(variants, key=str)
        if variant.id in wholes and not variant.step
    ]


def _kernels(variant: Variant, card_model: str, lists: Path | None) -> list[NeededTuple]:
    kept = lists / f"{variant.id}.json" if lists else None
    if kept is not None and kept.exists():
        return [NeededTuple(**entry) for entry in json.loads(kept.read_text())]
    plain = dataclasses.replace(variant, compile="default")
    sheet = data_sheet("cuda", card_model)
    needed = foreseen_kernels(plain, sheet.multiprocessors).needed()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([dataclasses.asdict(entry) for entry in needed]))
    return needed


def _compared(
    variant: Variant,
    needed: Sequence[NeededTuple],
    operators: StoredPredictor,
    kernels: Sequence[KernelReading],
    libraries: Sequence[LibraryReading],
    whole: Any,
) -> Compared:
    family = model_family(variant.model)
    learned = LearnedKernels.of(without_family(kernels, family), operators.card)
    assert learned is not None
    factors = library_factors(
        [reading for reading in libraries if family not in reading.families], operators
    )
    predictor = CompiledPredictor(operators, learned, operators.card, factors)
    predicted = predictor.predict(needed, needed)
    kernels_us = sum(
        call.time_us.value * entry.all_calls
        for call, entry in zip(predicted.calls, needed, strict=True)
        if is_kernel(entry)
    )
    total = predicted.total
    return Compared(
        variant, kernels_us, total.time_us, total.energy_mj, whole.time_us, whole.energy_mj
    )


def tables(results: Sequence[Compared]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| variant | measured | predicted, 90 % interval | kernels | time | inside | energy | inside |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for one in results:
        low, high = one.time_us.low or 0.0, one.time_us.high or 0.0
        share = one.kernels_us / one.time_us.value
        cells = [
            str(one.variant),
            f"{one.measured_us / 1e3:.3f} ms",
            f"{one.time_us.value / 1e3:.3f} ms ({low / 1e3:.3f} to {high / 1e3:.3f})",
            f"{100 * share:.0f} %",
            f"{100 * (one.time_ratio - 1):+.1f} %",
            _inside(one.time_us, one.measured_us),
            "" if one.energy_ratio is None else f"{100 * (one.energy_ratio - 1):+.1f} %",
            _inside(one.energy_mj, one.measured_mj),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_summary(results)])


def _inside(predicted: PredictedValue | None, measured: float | None) -> str:
    if predicted is None or measured is None or predicted.low is None or predicted.high is None:
        return ""
    return "yes" if predicted.low <= measured <= predicted.high else "no"


def _summary(results: Sequence[Compared]) -> list[str]:
    import numpy as np

    times = Score.of(np.log([one.time_ratio for one in results]))
    ratios = [one.energy_ratio for one in results if one.energy_ratio is not None]
    energies = Score.of(np.log(ratios)) if ratios else None
    inside = [_inside(one.time_us, one.measured_us) for one in results]
    energy_inside = [_inside(one.energy_mj, one.measured_mj) for one in results]
    lines = []
    for name, score, held in (("time", times, inside), ("energy", energies, energy_inside)):
        if score is not None:
            lines.append(
                f"- {name}: median error {100 * score.median:.1f} %, mean {100 * score.mean:.1f} %; "
                f"{held.count('yes')} of {score.count} intervals hold"
            )
    return lines


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", default="NVIDIA H200", help="the whole name of a card model")
    parser.add_argument("--lists", type=Path, help="a folder that keeps the lists of kernels")
    parser.add_argument("--write", type=Path, help="write the tables to this file")
    parser.add_argument("--refit", action="store_true", help="fit predictors without the family")
    options = parser.parse_args()
    with packaged_database().read() as session:
        text = tables(compared(session, options.card, options.lists, refit=options.refit))
    print(text)
    if options.write:
        options.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
