"""Choose the tuples to measure next, to reduce the error of the given models most. Write a
measurement file.

Tuples are ranked by their uncertain share of the models' time: calls x time x width of the
interval. Those far from all readings come first, because their intervals are uncertain, too. A
tuple similar to a chosen one (the same type, half to twice its time) counts half, because the
reading of one helps to predict the other. The file lists a tuple as a sweep if a sweep can create
it; otherwise it lists the model and the operator type."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from farm.addons.predict.estimate import SECONDS_A_TUPLE, Estimate, MissingTuple
from farm.errors import FarmError
from farm.subjects.sweep import RECIPES
from farm.types.request import Sweep
from farm.types.tuple import NeededTuple, plain, shapes_passed
from farm.types.variant import Variant

SIMILAR = 0.5  # the factor on a tuple that is similar to a chosen one
LEAST_FAR = 0.01  # share of the uncertainty from which a tuple far from all readings comes first


@dataclass(frozen=True)
class ProposedMeasurement:
    entry: MissingTuple
    gain: (
        float  # the uncertain share of a model's time that this tuple causes; mean over all models
    )
    models: tuple[str, ...]
    sweep: Sweep | None  # the sweep that creates this tuple; None if there is none

    def to_json(self) -> dict[str, Any]:
        return {
            "operator_id": self.entry.needed.operator_id,
            "operator": self.entry.needed.short_name,
            "label": self.entry.needed.label,
            "predicted_us": self.entry.predicted_us,
            "far": _is_far(self.entry),
            "gain": self.gain,
            "models": list(self.models),
            "sweep": {"operator": self.sweep.operator, "grid": self.sweep.grid}
            if self.sweep
            else None,
        }


@dataclass(frozen=True)
class MeasurementPlan:
    """The chosen tuples. `uncertain` is the sum of the gains of all missing tuples, without the
    factor `SIMILAR`.
    """

    proposals: tuple[ProposedMeasurement, ...]
    uncertain: float
    seconds: float  # card time, approximate
    file: str  # YAML

    def to_json(self) -> dict[str, Any]:
        return {
            "tuples": [proposal.to_json() for proposal in self.proposals],
            "unsure": self.uncertain,
            "card_time_s": self.seconds,
            "file": self.file,
        }


def _is_far(entry: MissingTuple) -> bool:
    return entry.predicted is not None and entry.predicted.far


def plan(estimates: Sequence[Estimate], most: int) -> MeasurementPlan:
    """Choose up to `most` tuples to measure. `estimates` are estimates of models, with
    predictions.
    """
    gains: dict[str, float] = defaultdict(float)
    missing_of: dict[str, list[tuple[Estimate, MissingTuple]]] = defaultdict(list)
    for estimate in estimates:
        total_us = estimate.total.time_us.value if estimate.total else 0.0
        for entry in estimate.missing:
            time = entry.predicted.time_us if entry.predicted else None
            if time and time.value and time.high and total_us:
                width = math.log(time.high / time.value)
                operator_id, calls = entry.needed.operator_id, entry.needed.all_calls
                gains[operator_id] += calls * time.value * width / total_us / len(estimates)
                missing_of[operator_id].append((estimate, entry))
    uncertain, left = math.fsum(gains.values()), dict(gains)
    far = {
        id_
        for id_, entries in missing_of.items()
        if _is_far(entries[-1][1]) and gains[id_] >= LEAST_FAR * uncertain
    }
    chosen: list[ProposedMeasurement] = []
    while left and len(chosen) < most:
        best = max(left, key=lambda id_: (id_ in far, left[id_], id_))
        _, entry = missing_of[best][-1]
        titles = tuple(estimate.title for estimate, _ in missing_of[best])
        sweep = _sweep_of(entry.needed)
        chosen.append(ProposedMeasurement(entry, left.pop(best), titles, sweep))
        for id_ in left:
            other = missing_of[id_][-1][1]
            times = (other.predicted_us or 0.0) / (entry.predicted_us or 1.0)
            if other.needed.short_name == entry.needed.short_name and 0.5 <= times <= 2:
                left[id_] *= SIMILAR
    each_s = [
        estimate.measuring_rest_s / len(estimate.missing)
        for estimate in estimates
        if estimate.missing
    ]
    seconds = len(chosen) * max(each_s, default=SECONDS_A_TUPLE)
    variants = {id_: entries[0][0].variant for id_, entries in missing_of.items()}
    return MeasurementPlan(tuple(chosen), uncertain, seconds, _file(chosen, variants))


def _sweep_of(needed: NeededTuple) -> Sweep | None:
    """Return a sweep with one combination that creates exactly this tuple, or None."""
    operator = needed.short_name
    grid = _grid(operator, needed.spec) if operator in RECIPES else None
    if grid is None:
        return None
    from farm.operators.sweep_builder import Expansion

    sweep = Sweep(operator, {name: (value,) for name, value in grid.items()})
    with contextlib.suppress(FarmError, ValueError, TypeError):
        made = list(itertools.chain.from_iterable(Expansion(sweep).batches()))
        if [made_tuple.id for made_tuple in made] == [needed.operator_id]:
            return sweep
    return None


def _grid(operator: str, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Guess the parameters of a sweep from the shapes of a tuple. The caller checks the guess."""
    recipe, tensors = RECIPES[operator], spec["tensors"]
    shapes = shapes_passed(spec)
    if not shapes or not shapes[0]:
        return None
    first, sizes = shapes[0], recipe.sizes
    options = {**spec["parameters"], **spec["keywords"]}
    grid = {name: plain(options[name]) for name in recipe.parameters if name in options}
    for (
        name,
        value,
    ) in grid.items():  # [3, 3] becomes 3, [768] becomes 768; different sizes remain a pair
        if isinstance(value, list) and value and all(size == value[0] for size in value):
            grid[name] = value[0]
    floating = [tensor["dtype"] for tensor in tensors if tensor["dtype"] in recipe.dtypes]
    grid["dtype"] = floating[0] if floating else recipe.dtypes[0]
    if "batch" in sizes:
        grid["batch"] = first[0]
    if "m" in sizes and len(shapes) > 1 and len(first) >= 2:
        grid |= {"m": first[-2], "k": first[-1], "n": shapes[1][-1]}
    elif "key_value_heads" in sizes and len(first) == 4 and len(shapes) > 1:
        kept = shapes[1]
        grid |= {
            "heads": first[1],
            "tokens": first[2],
            "head_features": first[3],
            "cache": kept[2] - first[2],
        }
        grid["key_value_heads"] = 0 if kept[1] == first[1] else kept[1]
    elif "image_size" in sizes and len(first) == 4:
        grid["image_size"] = first[2] if first[2] == first[3] else list(first[2:])
        grid |= {"channels": first[1]} if "channels" in sizes else {}
    elif "heads" in sizes and len(first) == 4:
        grid |= {"heads": first[1], "tokens": first[2], "head_features": first[3]}
    elif "tokens" in sizes and len(first) in (2, 3):
        grid["tokens"] = first[1] if len(first) == 3 or operator == "Embedding" else 0
        grid |= {name: first[-1] for name in ("features", "head_features") if name in sizes}
    else:
        return None
    return {name: value for name, value in grid.items() if value is not None}


def _file(chosen: Sequence[ProposedMeasurement], variants: Mapping[str, Variant]) -> str:
    """Return the text of a measurement file: first the sweeps, then models with operator types for
    other tuples.
    """
    entries: list[dict[str, Any]] = []
    types: dict[Variant, set[str]] = defaultdict(set)
    for proposal in chosen:
        if proposal.sweep is None:
            types[variants[proposal.entry.needed.operator_id]].add(proposal.entry.needed.short_name)
            continue
        # In the file, a list means several values, so a pair of sizes is a list in a list.
        values = {name: value for name, (value,) in proposal.sweep.grid.items()}
        grid = {
            name: [list(value)] if isinstance(value, list) else value
            for name, value in values.items()
        }
        entries.append(
            {"sweep": proposal.sweep.operator, "name": proposal.entry.needed.label, "grid": grid}
        )
    entries += [
        {**_of_variant(variant), "operators": sorted(names)} for variant, names in types.items()
    ]
    return yaml.safe_dump({"measurements": entries}, sort_keys=False, width=120, allow_unicode=True)


def _of_variant(variant: Variant) -> dict[str, Any]:
    """Return the options of a variant that differ from the defaults, as keys of a measurement
    file.
    """
    usual = {field.name: field.default for field in dataclasses.fields(Variant)}
    options = {"model": variant.model, "batch": variant.batch, "dtype": variant.dtype}
    for name, value in variant.to_json().items():
        omitted = name in (*options, "text", "weights") or (
            name == "length" and variant.phase == "decode"
        )
        if not omitted and value not in (0, "", None, usual.get(name)):
            options[name] = value
    return options
