"""An estimate as it is shown: the figures, what they are made of, what is missing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from cli.tables import Text, grid, row, ruled
from farm.report.tokens import PerToken
from farm.words.written import ENERGY, NOTHING, TIME, interval, percent, plural, quantity, span

if TYPE_CHECKING:
    from farm.report.estimate import Estimate
    from farm.report.generating import Generation

SHOWN = 10


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
    if found.predicted_us is not None:
        lines["the rest"] = f"{quantity(found.predicted_us, TIME)} at least, predicted by {found.predictor}"
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
        missing = ruled("not covered", ">calls", ">of the cost", *(f">{head}" for head in filled), drops=filled)
        for entry in found.missing[:SHOWN]:
            predicted = [quantity(entry.predicted_us, TIME)] if filled else []
            row(missing, entry.label, str(entry.calls), percent(entry.share), *predicted)
        parts += [Text(""), missing]
        if len(found.missing) > SHOWN:
            parts.append(Text(f"  {len(found.missing) - SHOWN} more; --json lists them.", style="dim"))
    return Group(*parts)
