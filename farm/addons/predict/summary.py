"""One line for a module: a table of its calls with shapes, parameters, FLOPs, and time and energy
if they are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from farm.addons.predict.estimate import Estimate
from farm.addons.predict.query import EstimateQuery
from farm.errors import FarmError
from farm.jobs.cards import all_own_cards
from farm.store.database import Database
from farm.subjects.label import call_of
from farm.training.captured_model import CapturedModel, capture_model
from farm.types.figure import PassCost, value_of
from farm.types.format import ENERGY, NOTHING, TIME, count_of, quantity
from farm.types.notebook import table

_COLUMNS = ("module", "call", "output", "parameters", "FLOPs", "time", "energy")
_USUAL_CARD = "H200"  # has packaged readings and a packaged predictor


@dataclass(frozen=True)
class SummaryRow:
    """One call of the model, in execution order."""

    module_path: str  # "" is the model itself
    call: str
    output_sizes: tuple[tuple[int, ...], ...]
    parameters: int  # elements; shared weights count in each call
    flops: int
    cost: PassCost | None  # of a prediction without its interval
    predicted: bool  # True if time and energy are predictions

    @property
    def time_us(self) -> float | None:
        return self.cost.time_us.value if self.cost else None

    @property
    def energy_mj(self) -> float | None:
        return value_of(self.cost.energy_mj) if self.cost else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names."""
        return {
            "module_path": self.module_path,
            "call": self.call,
            "output_sizes": self.output_sizes,
            "parameters": self.parameters,
            "flops": self.flops,
            "time_us": self.time_us,
            "energy_mj": self.energy_mj,
            "predicted": self.predicted,
        }


@dataclass(frozen=True)
class Summary:
    """The calls of a model. `print` shows a table, and a notebook an HTML table.

    Attributes:
        estimate: the cost of the model on a card; None without readings and predictions: `unknown`
            says why.
    """

    captured: CapturedModel
    rows: tuple[SummaryRow, ...]
    estimate: Estimate | None
    unknown: str = ""

    @property
    def parameters(self) -> int:
        """Elements of the model's parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.captured.model.parameters())

    @property
    def title(self) -> str:
        parameters = count_of(self.parameters, "").strip()
        return (
            f"{self.captured.title}: {parameters} parameters, "
            f"{count_of(self.captured.flops, 'FLOP')}"
        )

    @property
    def cost(self) -> str:
        """The total time and energy with their card and source, or why they are unknown."""
        estimate = self.estimate
        if estimate is None:
            return f"time and energy unknown: {self.unknown}"
        time = quantity(estimate.time.value, TIME)
        energy = quantity(estimate.energy.value, ENERGY) if estimate.energy else "energy unknown"
        if estimate.whole:
            source = "whole model measured"
        else:
            source = f"{estimate.covered_tuples} of {estimate.tuples} measured"
            source += ", ~ predicted" if estimate.missing else ""
        return f"{time}, {energy} on {estimate.card_model} ({source})"

    def to_json(self) -> dict[str, Any]:
        cost = self.estimate.to_json() if self.estimate else None
        return {
            "title": self.captured.title,
            "rows": [row.to_json() for row in self.rows],
            "estimate": cost,
        }

    def __repr__(self) -> str:
        return f"<Summary {self.title}; {self.cost}>"

    def __str__(self) -> str:
        cells = [_COLUMNS, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = [*"<<<", *">" * (len(widths) - 3)]
        lines = (
            "  ".join(
                f"{cell:{how}{width}}"
                for how, cell, width in zip(aligned, row, widths, strict=True)
            )
            for row in cells
        )
        return "\n".join([*(line.rstrip() for line in lines), self.title, self.cost])

    def _repr_html_(self) -> str:
        return table(self.title, _COLUMNS, self._cells(), self.cost)

    def _cells(self) -> Iterable[tuple[str, ...]]:
        for row in self.rows:
            mark = "~" if row.predicted else ""
            costs = (quantity(row.time_us, TIME), quantity(row.energy_mj, ENERGY))
            yield (
                row.module_path,
                row.call,
                ", ".join("x".join(map(str, size)) for size in row.output_sizes) or NOTHING,
                f"{row.parameters:,}" if row.parameters else NOTHING,
                count_of(row.flops, "FLOP") if row.flops else NOTHING,
                *(cell if cell == NOTHING else mark + cell for cell in costs),
            )


def summary(
    model: Any, *args: Any, card: str = "", database: Database | None = None, **kwargs: Any
) -> Summary:
    """Summarize a module: its calls with shapes, parameters and FLOPs, and the time and energy on a
    card.

    Runs nothing on a card. Time and energy come from readings and, marked with ``~``, from
    predictions.

    Args:
        model: a `torch.nn.Module`, or a `CapturedModel`.
        args, kwargs: example inputs, as in a call of the module.
        card: part of a card model's name. Default: the first GPU of this host, else an H200.
        database: source of readings. Default: the database of the settings, then the packaged
            readings.

    Raises:
        UsageError, CaptureError: see `capture_model`.

    Example:
        >>> print(farm.summary(torch.nn.Linear(64, 8), torch.randn(4, 64)))
    """
    captured = model if isinstance(model, CapturedModel) else capture_model(model, args, kwargs)
    cost_estimate, unknown = None, ""
    try:
        needed = captured.extraction.needed()
        if not card:
            own_gpus = (
                card_here.model
                for card_here in all_own_cards()
                if card_here.is_gpu and not card_here.refusal
            )
            card = next(own_gpus, _USUAL_CARD)
        cost_estimate = EstimateQuery(card).answer(captured.variant, needed, database=database)
    except FarmError as error:
        unknown = error.message
    missing = cost_estimate.missing_by_id if cost_estimate else {}
    rows = []
    for call in captured.extraction.capture.calls:
        spec, cost = (
            captured.extraction.capture.tuples[call.tuple_id],
            captured.extraction.costs[call.tuple_id],
        )
        of_call = cost_estimate.measured.get(call.tuple_id) if cost_estimate else None
        entry = missing.get(call.tuple_id)
        if entry is not None:
            of_call = entry.predicted.without_intervals if entry.predicted else None
        sizes = tuple(tuple(size) for size in cost.output_shapes or ())
        held_parameters, _ = spec.held_parameters
        columns = call.module_path, call_of(spec), sizes, held_parameters, cost.flops
        predicted = entry is not None and of_call is not None
        rows.append(SummaryRow(*columns, cost=of_call, predicted=predicted))
    return Summary(captured, tuple(rows), cost_estimate, unknown)
