"""The time that each slow tensor adds to a training step: from readings, or from its bytes and a
bandwidth.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.addons.memory.offload_plan import SlowCosts
from farm.errors import UsageError
from farm.models import catalog
from farm.operators.captured import CapturedCall
from farm.store.columns import OPERATOR, PROTOCOL, READING
from farm.store.database import fetch_values, in_batches
from farm.store.reuse import tells_others
from farm.subjects.allow_list import written_by_schema
from farm.subjects.parsing import parse
from farm.training.tensor_lifetime import Life
from farm.types.format import count_of
from farm.types.placement import Placement
from farm.types.protocol import Launch, Protocol
from farm.types.reading import CPU_METHOD, METHOD
from farm.types.request import Request
from farm.types.tuple import OperatorTuple
from farm.types.variant import Variant

# Compare medians: `time_us` is the median in readings with slow tensors (without power), but the
# mean in others.
_NAMES = ("subject_id", "protocol_id", "card_model", "software_id", "time_median_us", "flags")
_LARGE_BYTES = 1e6  # for smaller tensors, readings show the latency and not the bandwidth


@dataclass(frozen=True)
class MeasuredSlow:
    """Readings with slow tensors, of one card model and one software."""

    card_model: str
    # (tuple id, placement) -> time that the placement adds to one call
    added_us: Mapping[tuple[str, str], float]
    fast_us: Mapping[str, float]  # tuple id -> time of one call with all tensors fast
    # "operator tensor" -> bandwidths in bytes/s, with only this input slow
    rates: Mapping[str, Sequence[float]]


def slow_costs(
    life: Life,
    read: MeasuredSlow | None,
    bytes_per_s: float | None,
    copied_bytes_per_s: float | None,
    *,
    variant: Variant,
    card: str,
) -> SlowCosts:
    """Return the time that each slow tensor adds to the step.

    Args:
        read: readings with slow tensors; None if there are none.
        bytes_per_s: bandwidth for tensors without a reading; None: derived from the readings.
        copied_bytes_per_s: bandwidth of copies, used if no bandwidth follows from the readings.
        variant, card: used in the error message.

    Raises:
        UsageError: there is no bandwidth from arguments or readings.
    """
    added = read.added_us if read else {}
    rates = _rates(life, read)
    if bytes_per_s is None and (bytes_per_s := rates.pop("", copied_bytes_per_s)) is None:
        request = Request(variant=variant, placements="each")
        title = catalog.resolve(variant.model).title_of(variant)
        raise UsageError(
            f"There are no readings of {title} with tensors in slow memory on "
            f"{card or 'that card'}.",
            f"Take such readings with `{request.command().removesuffix(' --reuse none')}`, "
            "or give the bandwidth: --slow-bandwidth 55GB/s.",
        )
    slow_us: dict[int, float] = defaultdict(float)
    uses = left = 0
    read_us = 0.0
    for call in life.capture.calls:
        for word, number, size_bytes in tensors_of(life, call):
            uses += 1
            time_us = added.get((call.tuple_id, word))
            if time_us is not None:
                read_us += time_us
            else:
                left += 1
                alike = _alike(life.capture.tuples[call.tuple_id], word)
                time_us = size_bytes / rates.get(alike, bytes_per_s) * 1e6
            slow_us[number] += time_us
    source = (
        f"for {uses - left} of {uses} uses of a tensor, readings with only that tensor in slow "
        "memory"
    )
    source += f" on {read.card_model}" if read and uses > left else ""
    if left:
        others = "the bandwidth measured in other tuples of the operator, or " if rates else ""
        source += (
            f"; for the other {left}, the bytes of the tensor at "
            f"{others}{count_of(bytes_per_s, 'B')}/s"
        )
    together = _together(read, life.capture.tuples) if read else None
    total_us = sum(slow_us.values())
    read_share = read_us / total_us if total_us else 0.0
    return SlowCosts(dict(slow_us), read_share, bytes_per_s, source, together)


def tensors_of(life: Life, call: CapturedCall) -> Iterator[tuple[str, int, int]]:
    """Yield (placement with only this tensor slow, tensor number, bytes over the link) for each
    tensor of a call.
    """
    spec = life.capture.tuples[call.tuple_id]
    sizes = life.sizes_bytes
    for position, number in enumerate(call.reads):
        if sizes.get(number):
            ways = 2 if number in call.writes else 1
            yield f"in{position}", number, ways * min(_touched_bytes(spec, position), sizes[number])
    made = (number for number in call.writes if number not in call.reads and sizes.get(number))
    yield from ((f"out{position}", number, sizes[number]) for position, number in enumerate(made))


def _touched_bytes(spec: OperatorTuple, storage: int) -> int:
    return max(
        (tensor.distinct_bytes for tensor in spec.tensors if tensor.storage == storage), default=0
    )


def _rates(life: Life, read: MeasuredSlow | None) -> dict[str, float]:
    """Return median bandwidths in bytes/s: "operator tensor" (such as "add in0") -> median of its
    readings.

    The key "" has the median of all keys. The bandwidth of a call differs from that of a copy: a
    call may compute during the transfer, or read a tensor twice. Only tuples of this step give
    bandwidths of outputs, because a tuple does not contain the sizes of its outputs."""
    if read is None:
        return {}
    measured_rates: dict[tuple[str, str], tuple[str, int, float]] = {}
    for call in life.capture.calls:
        for word, _, size_bytes in tensors_of(life, call):
            if (added_us := read.added_us.get((call.tuple_id, word), 0.0)) > 0:
                measured_rates[call.tuple_id, word] = (
                    _alike(life.capture.tuples[call.tuple_id], word),
                    size_bytes,
                    added_us,
                )
    chosen = [rate for rate in measured_rates.values() if rate[1] >= _LARGE_BYTES] or (
        [] if read.rates else list(measured_rates.values())
    )
    each: dict[str, list[float]] = defaultdict(list)
    for alike, size_bytes, added_us in chosen:
        each[alike].append(size_bytes / added_us * 1e6)
    rates = {name: statistics.median(values) for name, values in {**each, **read.rates}.items()}
    return {**rates, "": statistics.median(rates.values())} if rates else {}


def _alike(spec: OperatorTuple, word: str) -> str:
    """Return operator and tensor as a key, without the library's name, which a capture without a
    card cannot know.
    """
    name = spec.operator.removeprefix("aten.")
    return f"{name.removeprefix('native_').removeprefix('cudnn_')} {word}"


def _together(read: MeasuredSlow, tuple_ids: Collection[str]) -> float | None:
    """Return the value of `SlowCosts.together`."""
    words: dict[str, list[Placement]] = defaultdict(list)
    for tuple_id, word in read.added_us:
        if tuple_id in tuple_ids:
            words[tuple_id].append(Placement.parse(word))
    shares = []
    for tuple_id, placements in words.items():
        alone = [placement for placement in placements if len(placement) == 1]
        most = max(placements, key=len)
        if len(most) == len(alone) > 1:
            fast_us = read.fast_us[tuple_id]
            summed_us = fast_us + sum(
                read.added_us[tuple_id, str(placement)] for placement in alone
            )
            shares.append(summed_us / (fast_us + read.added_us[tuple_id, str(most)]))
    return statistics.median(shares) if shares else None


def read_slow(
    session: Session, tuple_ids: Collection[str], card_models: Sequence[str], *, launch: Launch
) -> MeasuredSlow | None:
    """Query readings with slow tensors. Return those of the card model and software that cover the
    most tuples of the step (if equal, the most tuples); None without readings."""
    like = Protocol(launch=launch).to_json()
    words: dict[str, tuple[str, str]] = {}  # protocol id -> (data, placement)
    for row in session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec)):
        spec = dict(row.spec or {})
        word = spec.pop("placement", "")
        if {**spec, "data": None} == {**like, "data": None}:
            words[row.id] = (spec["data"], word)
    placed = [protocol_id for protocol_id, (_, word) in words.items() if word]
    method = sqlalchemy.case((READING.card_id.startswith("CPU-"), CPU_METHOD), else_=METHOD)
    newest: dict[tuple[str, str], dict[tuple[str, str, str], float]] = defaultdict(dict)

    def read(*which: Any) -> set[str]:
        query = sqlalchemy.select(*(READING[name] for name in _NAMES)).where(
            *which,
            READING.card_model.in_(card_models),
            READING.method == method,
            READING.simulated.is_(False),
        )
        subjects = set()
        for row in session.execute(query.order_by(READING.created_at_s, READING.id)):
            if tells_others(row.flags):
                key = row.subject_id, *words[row.protocol_id]
                newest[row.card_model, row.software_id][key] = row.time_median_us
                subjects.add(row.subject_id)
        return subjects

    subjects = set[str]().union(
        *(read(READING.protocol_id.in_(batch)) for batch in in_batches(placed))
    )
    fast = list(words.keys() - set(placed))
    for batch in in_batches(sorted(subjects)):
        read(READING.subject_id.in_(batch), READING.protocol_id.in_(fast))
    measured = []
    for (model, _), rows in newest.items():
        added_us, fast_us = {}, {}
        for (tuple_id, data, word), time_us in rows.items():
            if word and (all_fast_us := rows.get((tuple_id, data, ""))) is not None:
                added_us[tuple_id, word] = max(0.0, time_us - all_fast_us)
                fast_us[tuple_id] = all_fast_us
        measured.append(MeasuredSlow(model, added_us, fast_us, {}))
    best = max(
        measured,
        key=lambda one: (sum(id_ in tuple_ids for id_, _ in one.added_us), len(one.added_us)),
        default=None,
    )
    if best is None or not best.added_us:
        return None
    stored = fetch_values(session, (OPERATOR.id, OPERATOR.spec), best.fast_us)
    return replace(
        best,
        rates=_input_rates({id_: parse(row.spec) for id_, row in stored.items()}, best.added_us),
    )


def _input_rates(
    tuples: Mapping[str, OperatorTuple], added: Mapping[tuple[str, str], float]
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = defaultdict(list)
    for (tuple_id, word), added_us in added.items():
        placement, spec = Placement.parse(word), tuples.get(tuple_id)
        if (
            spec is None
            or spec.kind != "aten"
            or len(placement) != 1
            or not placement.inputs
            or added_us <= 0
        ):
            continue
        (storage,) = placement.inputs
        written = any(spec.tensors[index].storage == storage for index in written_by_schema(spec))
        size_bytes = _touched_bytes(spec, storage) * (2 if written else 1)
        if size_bytes >= _LARGE_BYTES:
            rates[_alike(spec, word)].append(size_bytes / added_us * 1e6)
    return dict(rates)
