"""An estimate as it is shown: the figures, what they are made of, what is missing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from cli.tables import Text, grid, row, ruled
from farm.estimate.per_token import PerToken
from farm.types.format import ENERGY, NOTHING, TIME, Units, interval, percent, plural, quantity, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.estimate.estimate import Estimate, Missing
    from farm.estimate.generation import Generation
    from farm.prediction.predictor import Range

SHOWN = 10
_SHARES = {"measured": "measured", "predicted": "predicted", "unseen_types": "of types that nobody has read"}


def generation(found: Generation) -> RenderableType:
    """A text that a model writes: the prompt, a decode at each length of the cache that was read, and the sum."""
    prompt = found.prefill.variant
    table = ruled("", ">time", ">energy", drops=())
    for one in (found.prefill, *found.decodes):
        energy = one.whole_energy or one.energy
        row(table, str(one.variant), interval(one.whole_time or one.time, TIME), interval(energy, ENERGY))
    table.add_section()
    row(
        table,
        f"{found.tokens} tokens after it",
        interval(found.time, TIME),
        interval(found.energy, ENERGY),
        style="bold",
    )
    told = PerToken(prompt.batch * found.tokens, found.tokens_per_s, found.energy_per_token_mj)
    return Group(
        Text(f"{prompt}, then {found.tokens} tokens each", style="bold"),
        table,
        Text(f"  {str(told).replace('a pass', 'written')}"),
        *(Text(f"  {note}") for note in found.notes),
    )


def estimate(found: Estimate) -> RenderableType:
    table = grid(2)
    covered = f"{percent(found.coverage)} of the estimated cost; {found.covered_tuples} of {found.tuples} tuples"
    lines = {
        "card": found.card_model,
        "software": f"torch {found.software.torch}, CUDA {found.software.cuda or NOTHING}, driver {found.software.driver or NOTHING}",
        "protocol": f"{found.protocol.launch} launch, {found.protocol.residency} data",
        "covered": covered,
        "time": interval(found.time, TIME),
        "energy": interval(found.energy, ENERGY) if found.energy else "not available",
    }
    if found.whole_time:
        energy = f", {interval(found.whole_energy, ENERGY)}" if found.whole_energy else ""
        lines["whole model"] = f"{interval(found.whole_time, TIME)}{energy}, read"
    if told := str(found.per_token):
        lines["tokens"] = told
    if found.predicted_us is not None and found.missing:
        bound = " at least" if found.total_time and found.total_time.low is None else ""
        lines["the rest"] = f"{quantity(found.predicted_us, TIME)}{bound}, predicted by {found.predictor}"
        if not bound:
            lines["together"] = ", ".join(
                filter(None, (ranged(found.total_time, TIME), ranged(found.total_energy, ENERGY)))
            )
            lines["made of"] = ", ".join(
                f"{percent(share)} {_SHARES[name]}" for name, share in found.shares.items() if share
            )
    if found.missing:
        number = len(found.missing)
        lines["missing"] = (
            f"{number} {plural('tuple', number)}; measuring takes about {span(found.measuring_rest_s)} of a card"
        )
    if found.other_data_calls:
        lines["data"] = f"{found.other_data_calls} calls in another class of data than the model shows them"
    if found.flags:
        lines["flags"] = ", ".join(f"{name} ×{number}" for name, number in found.flags.items())
    if foreign := [f"{number} from {name}" for name, number in found.origins.items() if name]:
        lines["readings"] = ", ".join(foreign)
    if found.oldest_at_s:
        lines["age"] = f"the oldest reading is {span(time.time() - found.oldest_at_s)} old"
    for name, value in lines.items():
        row(table, f"  {name}", value)
    parts: list[RenderableType] = [
        Text(str(found.variant), style="bold"),
        table,
        *(Text(f"  {note}") for note in found.notes),
    ]
    if found.missing:
        filled = ["predicted"] if found.predictor else []
        entries = {entry.operator_id: entry for entry in found.missing}
        order = [entries[id_] for id_ in found.narrowing] or list(found.missing)
        head = "not read, what would narrow it most first" if found.narrowing else "not covered"
        missing = ruled(head, ">calls", ">of the cost", *(f">{name}" for name in filled), drops=filled)
        for entry in order[:SHOWN]:
            predicted = [ranged_call(entry)] if filled else []
            row(missing, entry.label, str(entry.calls), percent(entry.share), *predicted)
        parts += [Text(""), missing]
        if len(found.missing) > SHOWN:
            parts.append(Text(f"  {len(found.missing) - SHOWN} more; --json lists them.", style="dim"))
    return Group(*parts)


def ranged(found: Range | None, units: Units) -> str:
    """`8.41 ms (7.2 to 9.8)`: a prediction's 90 % interval; "" for None."""
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return quantity(found.value, units)
    return f"{quantity(found.value, units)} ({quantity(found.low, units)} to {quantity(found.high, units)})"


def ranged_call(entry: Missing) -> str:
    """One call, with a mark where nobody has read its type."""
    if entry.predicted_low_us is None or entry.predicted_high_us is None:
        return quantity(entry.predicted_us, TIME)
    low, high = (quantity(value, TIME) for value in (entry.predicted_low_us, entry.predicted_high_us))
    mark = "" if entry.known else ", type never read"
    return f"{quantity(entry.predicted_us, TIME)} ({low} to {high}{mark})"


def curve(found: Sequence[Estimate]) -> RenderableType:
    """A line for each size."""
    table = ruled("", ">time", ">90 %", ">energy", ">90 %", ">measured", ">predicted", drops=())
    for one in found:
        time, energy = one.total_time, one.total_energy
        shares = one.shares
        row(
            table,
            str(one.variant),
            quantity(time.value if time else one.time.value, TIME),
            _ends(time, TIME),
            quantity(energy.value if energy else one.energy.value if one.energy else None, ENERGY),
            _ends(energy, ENERGY),
            percent(shares["measured"]) if shares else percent(one.coverage),
            percent(1 - shares["measured"]) if shares else NOTHING,
        )
    notes = dict.fromkeys(note for one in found for note in one.notes)
    return Group(Text(f"on {found[0].card_model}", style="bold"), table, *(Text(f"  {note}") for note in notes))


def _ends(found: Range | None, units: Units) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{quantity(found.low, units)} to {quantity(found.high, units)}"


def narrowed(before: Estimate, after: Estimate) -> RenderableType:
    """What some readings changed."""
    table = ruled("", ">time", ">energy", ">measured", drops=())
    for name, one in (("before", before), ("with what was read", after)):
        row(
            table,
            name,
            ranged(one.total_time, TIME) or interval(one.time, TIME),
            ranged(one.total_energy, ENERGY) or interval(one.energy, ENERGY),
            percent(one.shares.get("measured", one.coverage)),
        )
    return Group(table, Text(""))
