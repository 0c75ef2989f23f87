"""Measure a module or a function as a whole and store the reading under a name: the fixture
`farm_benchmark`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farm.benchmark_process.client import CardReading
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.lock import CardLock
from farm.errors import FarmError, UsageError, told
from farm.jobs.in_process import GivenWhole, how_to_measure, measure_whole, own_card
from farm.jobs.own_card import keep_reading
from farm.settings import settings
from farm.store.content import store_variant
from farm.store.database import Database
from farm.store.reuse import UNSOUND
from farm.store.upgrades import writable_database
from farm.training.captured_model import variant_named
from farm.types.fields import cost_from_json, cost_json
from farm.types.figure import PassCost, value_of
from farm.types.format import ENERGY, TIME, interval
from farm.types.protocol import Protocol
from farm.types.reading import Reading
from farm.verdict.judging import DISTURBED


@dataclass(frozen=True)
class Benchmark:
    """The cost of one call. Half-widths are of 95 % intervals. Energy is None if the card does not
    report it.
    """

    name: str
    cost: PassCost
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, reading: Reading) -> Benchmark:
        """The cost of one call in a reading."""
        return cls(name, PassCost(reading.time_us, reading.energy_mj), reading.flags)

    @property
    def time_us(self) -> float:
        return self.cost.time_us.value

    @property
    def time_half_width_us(self) -> float:
        return self.cost.time_us.half_width

    @property
    def energy_mj(self) -> float | None:
        return value_of(self.cost.energy_mj)

    @property
    def energy_half_width_mj(self) -> float | None:
        return self.cost.energy_mj.half_width if self.cost.energy_mj else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names."""
        return {
            "name": self.name,
            **cost_json(self.cost),
            "flags": list(self.flags),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Benchmark:
        cost = cost_from_json(data)
        assert cost is not None
        return cls(data["name"], cost, tuple(data["flags"]))

    @property
    def disturbed(self) -> str:
        """Why the reading is doubtful; "" if it is sound."""
        return "; ".join(DISTURBED.get(name, name) for name in self.flags if name in UNSOUND)

    def __repr__(self) -> str:
        energy = f", {interval(self.cost.energy_mj, ENERGY)}" if self.energy_mj else ""
        return f"<Benchmark {self.name}: {interval(self.cost.time_us, TIME)}{energy}>"


def measure_benchmark(
    target: Any,
    inputs: tuple[Any, ...],
    *,
    name: str,
    revision: str | None,
    card: str = "",
    quick: bool = False,
) -> Benchmark:
    """Measure a copy of a module, or a function as it is, in this process, and store the reading.

    The database is opened and checked first. If it fails after the measurement, the reading is
    stored in a database of its own (`_kept`).

    Raises:
        UsageError, NoSuchCard: the target is neither a module nor a function, or there is no such
        card. SchemaMismatch, DatabaseUnreachable: the database cannot store the reading; either
        nothing was measured, or the message names the file with the reading.
        CardBusy: another process measures on the card.
        Unmeasurable: the target raises an error, or the card lacks memory.
    """
    import torch

    from farm.benchmark_process.server import software_of

    if not callable(target) or (chosen := own_card(card)).is_simulated:
        raise UsageError(
            f"{target!r:.60} cannot run on a card.", "Give a module or a function, and a real card."
        )
    whole = _whole_of(target, inputs, name, revision)
    protocol = None
    if not isinstance(target, torch.nn.Module):
        protocol = Protocol(launch="eager", data="normal", grad=True)
    how, until = how_to_measure(chosen, protocol, None, quick=quick, data="normal")

    with contextlib.closing(writable_database()) as database:
        with CardLock(chosen.id, settings().lock_dir):
            reading = measure_whole(whole, chosen, MeasureRequest(whole.subject, how, until))
        reading = reading.noting(revision=revision)
        measured = CardReading(reading, software_of(torch, chosen), chosen)
        try:
            _store(database, whole, measured, how)
        except Exception as error:
            raise _kept(error, whole, measured, how) from error
    return Benchmark.of(name, reading)


def _whole_of(target: Any, inputs: tuple[Any, ...], name: str, revision: str | None) -> GivenWhole:
    """Return what to measure. A function becomes a module; its inputs do not name its sizes."""
    import torch

    model, sized = target, inputs
    if not isinstance(target, torch.nn.Module):
        model = type("Function", (torch.nn.Module,), {"forward": staticmethod(target)})().eval()
        sized = ()
    variant = variant_named(name, [*model.parameters(), *sized], sized, training=model.training)
    # Other code is another subject.
    variant = dataclasses.replace(variant, version=(revision or "")[:12])
    return GivenWhole(variant, model, args=inputs, kwargs={})


def _store(
    database: Database, whole: GivenWhole, measured: CardReading, protocol: Protocol
) -> None:
    with database.write() as session:
        store_variant(session, whole.variant)
    keep_reading(database, measured, whole.subject, protocol)


def _kept(
    error: Exception, whole: GivenWhole, measured: CardReading, protocol: Protocol
) -> FarmError:
    """Store a reading that the database refused in a new SQLite database in the state folder.

    Return the error to raise: the database's error, and where the reading is."""
    benchmark = Benchmark.of(whole.variant.model, measured.reading)
    reason = error.message if isinstance(error, FarmError) else told(error)
    problem = f"The reading of {benchmark.name} could not be stored: {reason}"
    kind = type(error) if isinstance(error, FarmError) else FarmError
    path = settings().state_dir / f"kept-{uuid.uuid4().hex[:8]}.db"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Database(f"sqlite:///{path}")) as database:
            database.create_or_check()
            _store(database, whole, measured, protocol)
    except Exception as second:
        return kind(
            f"{problem} It could not be kept in {path} either: {told(second)} "
            f"It was {benchmark!r}.",
            "Correct the cause, then measure again.",
        )
    return kind(
        f"{problem} It is kept in the database {path}.",
        f"Correct the cause. Then `FARM_DATABASE_URL=sqlite:///{path} farm export kept` and "
        "`farm import kept` add it.",
    )
