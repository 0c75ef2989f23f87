"""Measure a module or a function as a whole and store the reading under a name: the fixture
`farm_benchmark`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from farm.api.capture import variant_named
from farm.api.measure import how_to_measure, measure_whole, own_card
from farm.api.notebook import measured
from farm.benchmark_process.client import Measured
from farm.devices.lock import CardLock
from farm.errors import UsageError
from farm.jobs.item_driver import keep_reading
from farm.settings import settings
from farm.store.content import UNSOUND, store_variant
from farm.store.upgrades import writable_database
from farm.types.fields import names_of
from farm.types.format import ENERGY, TIME
from farm.types.protocol import Protocol, Subject
from farm.verdict.judging import DISTURBED


@dataclass(frozen=True)
class Benchmark:
    """The cost of one call. Half-widths are of 95 % intervals. Energy is None if the card does not
    report it.
    """

    name: str
    time_us: float
    time_half_width_us: float
    energy_mj: float | None = None
    energy_half_width_mj: float | None = None
    flags: tuple[str, ...] = ()

    @property
    def disturbed(self) -> str:
        """Why the reading is doubtful; "" if it is sound."""
        return "; ".join(DISTURBED.get(name, name) for name in self.flags if name in UNSOUND)

    def __repr__(self) -> str:
        energy = (
            f", {measured(self.energy_mj, self.energy_half_width_mj, ENERGY)}"
            if self.energy_mj
            else ""
        )
        return (
            f"<Benchmark {self.name}: "
            f"{measured(self.time_us, self.time_half_width_us, TIME)}{energy}>"
        )


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

    Raises:
        UsageError, NoSuchCard: the target is neither a module nor a function, or there is no such
        card. SchemaMismatch, DatabaseUnreachable: the database cannot store the reading; nothing
        was measured.
        CardBusy: another process measures on the card.
        Unmeasurable: the target raises an error, or the card lacks memory.
    """
    import torch

    from farm.benchmark_process.server import software_of

    if not callable(target) or (chosen := own_card(card)).kind == "simulated":
        raise UsageError(
            f"{target!r:.60} cannot run on a card.", "Give a module or a function, and a real card."
        )
    model, protocol, sized = target, None, inputs
    if not isinstance(target, torch.nn.Module):
        model = type("Function", (torch.nn.Module,), {"forward": staticmethod(target)})().eval()
        protocol, sized = Protocol(launch="eager", data="normal", grad=True), ()
    how, until = how_to_measure(chosen, protocol, None, quick=quick, data="normal")
    variant = variant_named(name, [*model.parameters(), *sized], sized, training=model.training)
    variant = dataclasses.replace(
        variant, version=(revision or "")[:12]
    )  # other code is another subject
    subject = Subject("variant", variant.id, variant.to_json())
    captured: Any = SimpleNamespace(
        variant=variant, model=model, args=inputs, kwargs={}
    )  # without its operators
    with contextlib.closing(
        writable_database()
    ) as database:  # before the measurement: it may refuse
        with CardLock(chosen.id, settings().lock_dir):
            reading = measure_whole(captured, chosen, subject, how, until).noting(revision=revision)
        with database.write() as session:
            store_variant(session, variant)
        keep_reading(database, Measured(reading, software_of(torch, chosen), chosen), subject, how)
    return Benchmark(name, *(getattr(reading, one) for one in names_of(Benchmark)[1:]))
