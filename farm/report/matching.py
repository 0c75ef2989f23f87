"""Pair the tuples and the models of the two sides of a comparison.

Models are matched by their variants and tuples by their descriptions. The dtype may differ, and so
may a field that both sides filter on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlmodel import Session

from farm.report.compared_side import ComparedModel, LoadedSide
from farm.report.comparison import Side, Weights
from farm.store.columns import OPERATOR
from farm.store.database import by_key, fetch_values
from farm.verdict.cost_line import CostLine


class Counted(NamedTuple):
    """A tuple of a side, and the number of calls with which it is compared.

    There are thousands: a dataclass is made four times as slowly."""

    line: CostLine
    calls: int


class Pair(NamedTuple):
    """The same tuple on both sides."""

    a: Counted
    b: Counted

    @property
    def short_name(self) -> str:
        return self.a.line.subject.short_name


@dataclass(frozen=True)
class Matching:
    """The tuples of both sides with a reading, paired.

    Attributes:
        texts: tuple id -> its description, if the sides differ in the dtype.
    """

    pairs: Sequence[tuple[CostLine, CostLine]]
    only_a: Sequence[CostLine]
    only_b: Sequence[CostLine]
    texts: Mapping[str, str]

    def key(self, loaded: LoadedSide, line: CostLine) -> str:
        return _key(self.texts, loaded, line)


def _key(texts: Mapping[str, str], loaded: LoadedSide, line: CostLine) -> str:
    """Return what is equal for the same tuple on both sides: its id, or its description without the
    side's dtype.
    """
    operator_id = line.subject.operator_id
    if operator_id not in texts:
        return operator_id
    return texts[operator_id].replace(f'"{loaded.side.dtypes[0]}"', '"*"')


def match(session: Session, a: LoadedSide, b: LoadedSide) -> Matching:
    """Pair equal tuples, preferably with equal data classes."""
    texts = _texts(session, a, b)
    left_b: dict[str, dict[str, CostLine]] = defaultdict(dict)  # key -> data class -> tuple
    for line in b.measured:
        left_b[_key(texts, b, line)][line.subject.data] = line

    pairs, unmatched = [], []
    for line in a.measured:
        others = left_b[_key(texts, a, line)]
        if line.subject.data in others:
            pairs.append((line, others.pop(line.subject.data)))
        else:
            unmatched.append((line, others))

    only_a = []
    for line, others in unmatched:
        if others:
            _, other = others.popitem()
            pairs.append((line, other))
        else:
            only_a.append(line)

    only_b: list[CostLine] = []
    for others in left_b.values():
        only_b += others.values()
    return Matching(pairs, only_a, only_b, texts)


def _texts(session: Session, a: LoadedSide, b: LoadedSide) -> dict[str, str]:
    """Return tuple id -> description; {} unless each side has one dtype and they differ."""
    if len(a.side.dtypes) != 1 or len(b.side.dtypes) != 1 or a.side.dtypes == b.side.dtypes:
        return {}
    ids = [line.subject.operator_id for line in (*a.lines, *b.lines)]
    stored = fetch_values(session, (OPERATOR.id, OPERATOR.spec), ids)
    return {id_: json.dumps(row.spec, sort_keys=True) for id_, row in stored.items()}


def weights_of(a: Side, b: Side) -> Weights:
    """Say by which number of calls the tuples of two sides are multiplied."""
    if a.job_id and b.job_id:
        return "own calls"
    if a.job_id:
        return "calls of A"
    return "calls of B" if b.job_id else "once"


def counted_pairs(pairs: Sequence[tuple[CostLine, CostLine]], weights: Weights) -> list[Pair]:
    """Give the tuples of each pair their numbers of calls."""
    counted = []
    for line, other in pairs:
        calls_a = other.count if weights == "calls of B" else line.count
        calls_b = other.count if weights == "own calls" else calls_a
        counted.append(Pair(Counted(line, calls_a), Counted(other, calls_b)))
    return counted


def paired_models(a: LoadedSide, b: LoadedSide) -> list[tuple[ComparedModel, ComparedModel]]:
    """Pair the models of both sides. Two jobs are one pair. Else pair equal variants first; then
    variants that differ in the version of a user's own model; then those that also differ in fields
    that both sides filter on."""
    if a.side.job_id and b.side.job_id:
        return [(a.models[0], b.models[0])]

    version = frozenset({"version"})
    left_a, left_b = list(a.models), list(b.models)
    pairs = []
    for ignored in (frozenset[str](), version, version | (a.fields & b.fields)):
        of_a, of_b = _by_variant(left_a, ignored), _by_variant(left_b, ignored)
        common = of_a.keys() & of_b.keys()
        pairs += [(_most_complete(of_a[text]), _most_complete(of_b[text])) for text in common]
        left_a = [model for model in left_a if model.text_without(ignored) not in common]
        left_b = [model for model in left_b if model.text_without(ignored) not in common]
    return sorted(pairs, key=lambda pair: [(model.title, model.job_id) for model in pair])


def _by_variant(
    models: Sequence[ComparedModel], ignored: frozenset[str]
) -> dict[str, list[ComparedModel]]:
    return by_key(lambda model: model.text_without(ignored), models)


def _most_complete(models: Sequence[ComparedModel]) -> ComparedModel:
    """Return the last model: the models of a side are ordered by coverage."""
    if len(models) == 1:
        return models[0]
    return replace(models[-1], note=f"the most complete of {len(models)} jobs")
