"""What to read next: the tuples whose readings lower the error of a stated set of models most, as a measurement file.

Tuples are ranked by how much of the models' time they are unsure of: calls x time x width of the interval, of each model as a share.
A tuple beside one that is chosen already - the same type, half to twice its time - counts half, as a reading of the one tells of the other.
What a sweep can make is written as one; of the rest the model's own operators of that type are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from farm.errors import FarmError
from farm.estimate.estimate import SECONDS_A_TUPLE, Estimate, Missing
from farm.operators.sweep import RECIPES
from farm.types.protocol import Variant
from farm.types.request import Sweep
from farm.types.tuple import plain, tensor_references

ALIKE = 0.5  # what a tuple still counts beside one that is chosen


@dataclass(frozen=True)
class Wish:
    """A tuple to be read: its `gain` is the share of the models' time that is unsure for its sake, of all models together."""

    entry: Missing
    gain: float
    models: tuple[str, ...]
    sweep: Sweep | None  # that makes it, where one does


@dataclass(frozen=True)
class ReadingPlan:
    wishes: tuple[Wish, ...]
    unsure: float  # of all tuples that were not read, the sum of what each counts alone
    seconds: float  # of a card, about
    file: str  # YAML

    def to_json(self) -> dict[str, Any]:
        return {
            "tuples": [
                {
                    "operator_id": wish.entry.operator_id,
                    "operator": wish.entry.operator,
                    "label": wish.entry.label,
                    "gain": wish.gain,
                    "predicted_us": wish.entry.predicted_us,
                    "models": list(wish.models),
                    "sweep": {"operator": wish.sweep.operator, "grid": wish.sweep.grid} if wish.sweep else None,
                }
                for wish in self.wishes
            ],
            "unsure": self.unsure,
            "card_time_s": self.seconds,
            "file": self.file,
        }


def plan(estimates: Sequence[Estimate], most: int) -> ReadingPlan:
    """
    Args:
        estimates: of the models, with predictions.
        most: tuples to choose.
    """
    gains: dict[str, float] = {}
    entries: dict[str, Missing] = {}
    of_models: dict[str, list[Estimate]] = {}
    specs: dict[str, Any] = {}
    for one in estimates:
        total_us = one.total_time.value if one.total_time else 0.0
        for entry in one.missing:
            if not entry.predicted_us or not entry.predicted_high_us or not total_us:
                continue
            width = math.log(entry.predicted_high_us / entry.predicted_us)
            share = entry.calls * entry.predicted_us * width / total_us / len(estimates)
            gains[entry.operator_id] = gains.get(entry.operator_id, 0.0) + share
            entries[entry.operator_id] = entry
            of_models.setdefault(entry.operator_id, []).append(one)
            specs[entry.operator_id] = one.specs[entry.operator_id]
    unsure, left = math.fsum(gains.values()), dict(gains)
    chosen: list[Wish] = []
    while left and len(chosen) < most:
        best = max(left, key=lambda id_: (left[id_], id_))
        entry = entries[best]
        titles = tuple(str(one.variant) for one in of_models[best])
        chosen.append(Wish(entry, left.pop(best), titles, sweep_of(entry.operator, specs[best], best)))
        for id_ in left:
            if _alike(entries[id_], entry):
                left[id_] *= ALIKE
    each = [one.measuring_rest_s / len(one.missing) for one in estimates if one.missing]
    seconds = len(chosen) * (max(each) if each else SECONDS_A_TUPLE)
    return ReadingPlan(tuple(chosen), unsure, seconds, _file(chosen, of_models))


def _alike(one: Missing, other: Missing) -> bool:
    return one.operator == other.operator and 0.5 <= (one.predicted_us or 0.0) / (other.predicted_us or 1.0) <= 2


def sweep_of(operator: str, spec: Mapping[str, Any], operator_id: str) -> Sweep | None:
    """The sweep of one combination that makes exactly this tuple; None where none does."""
    if operator not in RECIPES:
        return None
    from farm.operators.sweep import Expansion

    grid = _grid(operator, spec)
    if grid is None:
        return None
    sweep = Sweep(operator, {name: (value,) for name, value in grid.items()})
    with contextlib.suppress(FarmError, ValueError, TypeError):
        made = [tuple_ for batch in Expansion(sweep).batches() for tuple_ in batch]
        if [one.id for one in made] == [operator_id]:
            return sweep
    return None


def _grid(operator: str, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a sweep's names would be of a tuple, as far as its shapes tell; a guess that is checked by making it."""
    recipe, tensors = RECIPES[operator], spec["tensors"]
    trees = [*spec["arguments"], *spec["keywords"].values()]
    shapes = [tensors[index]["shape"] for tree in trees for index in tensor_references(tree)]
    if not shapes or not shapes[0]:
        return None
    first, sizes = shapes[0], recipe.sizes
    said = {**spec["parameters"], **spec["keywords"]}
    grid = {name: _single(plain(said[name])) for name in recipe.parameters if name in said}
    floating = [tensor["dtype"] for tensor in tensors if tensor["dtype"] in recipe.dtypes]
    grid["dtype"] = floating[0] if floating else recipe.dtypes[0]
    if "batch" in sizes:
        grid["batch"] = first[0]
    if "m" in sizes and len(shapes) > 1 and len(first) >= 2:
        grid |= {"m": first[-2], "k": first[-1], "n": shapes[1][-1]}
    elif "key_value_heads" in sizes and len(first) == 4 and len(shapes) > 1:
        kept = shapes[1]
        grid |= {"heads": first[1], "tokens": first[2], "head_features": first[3], "cache": kept[2] - first[2]}
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


def _single(value: Any) -> Any:
    """`[3, 3]` is 3, `[768]` 768; a pair of two sizes stays one."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def _file(chosen: Sequence[Wish], of_models: Mapping[str, Sequence[Estimate]]) -> str:
    """A measurement file: a sweep for each tuple that one makes, then models with the types of the others."""
    entries: list[dict[str, Any]] = [
        {"sweep": wish.sweep.operator, "name": wish.entry.label, "grid": _written(wish.sweep.grid)}
        for wish in chosen
        if wish.sweep
    ]
    types: dict[Variant, set[str]] = {}
    for wish in chosen:
        if wish.sweep is None:
            types.setdefault(of_models[wish.entry.operator_id][0].variant, set()).add(wish.entry.operator)
    entries += [{**_of_variant(variant), "operators": sorted(names)} for variant, names in types.items()]
    return yaml.safe_dump({"measurements": entries}, sort_keys=False, width=120, allow_unicode=True)


def _written(grid: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [list(value[0])] if isinstance(value[0], list) else value[0] for name, value in grid.items()}


def _of_variant(variant: Variant) -> dict[str, Any]:
    """What was said of it: keys of a measurement file."""
    usual = {field.name: field.default for field in dataclasses.fields(Variant)}
    told = {"model": variant.model, "batch": variant.batch, "dtype": variant.dtype}
    for name, value in variant.to_json().items():
        needless = name in (*told, "text", "weights") or (name == "length" and variant.phase == "decode")
        if not needless and value not in (0, "", None, usual.get(name)):
            told[name] = value
    return told
