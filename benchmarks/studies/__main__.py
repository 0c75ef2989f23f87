"""The command line of the studies: one command per question. Each prints a table and stores its
result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from typer.core import TyperGroup

from benchmarks.studies import STUDIES, Study
from cli import output, tables
from cli.main import reported_errors
from cli.options import AsJson
from cli.output import answer, say
from cli.tables import Text
from farm.errors import UsageError
from farm.types.format import ENERGY, NOTHING, POWER, TIME, percent, quantity, span

if TYPE_CHECKING:
    from benchmarks.studies.results import ResultColumn, StudyResult

PROGRAM = "python -m benchmarks.studies"
_MOST_FAILURES = 5


class _Commands(TyperGroup):
    """Turns an exception into one message and an exit code, as `farm` does."""

    def invoke(self, ctx: Any) -> Any:
        with reported_errors(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    name=PROGRAM,
    cls=_Commands,
    pretty_exceptions_enable=False,
    help=(
        "Repeat the measurements behind the method on a card; each study prints a table and "
        "stores it."
    ),
    no_args_is_help=True,
)
Picture = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", help="Draw the findings to a file (.png, .svg or .pdf)."),
]


def _verb(study: Study) -> Callable[..., None]:
    def verb(
        model: str = typer.Argument(
            "resnet18", metavar="[MODEL]", help="The model whose tuples are measured."
        ),
        batch: int | None = typer.Option(
            None, "-b", "--batch", help="Batch size. Default: as in `farm run`."
        ),
        dtype: str | None = typer.Option(
            None, help="Data type: float32, float16 or bfloat16. Default: float32."
        ),
        card: str | None = typer.Option(
            None, help="A card of this host, as in `farm run`. Default: the first."
        ),
        tuples: int | None = typer.Option(
            None, min=1, help="Measure only this many of the model's most expensive tuples."
        ),
        quick: bool = typer.Option(
            False, "--quick", help="Measure less: about a minute of card time."
        ),
        png: Picture = None,
        as_json: AsJson = False,
    ) -> None:
        from benchmarks.studies import results
        from benchmarks.studies.laboratory import StudyOptions
        from farm.addons.pages import plots
        from farm.jobs.cards import all_own_cards
        from farm.models.catalog import find
        from farm.requests.partial_request import PartialRequest, complete
        from farm.settings import settings

        find(model)
        if png is not None:
            plots.check_path(png)
        chosen = output.chosen_own_cards([card] if card else [])[0]
        request = complete(
            PartialRequest(model=model, batch=batch, dtype=dtype),
            chosen.kind,
            target=settings().target,
        )
        assert request.variant is not None
        neighbours = tuple(
            other
            for other in all_own_cards()
            if other.kind == chosen.kind and other.id != chosen.id and not other.refusal
        )
        options = StudyOptions(request.variant, quick, tuples, neighbours)
        with output.writable_database() as database:
            made = results.perform(study, database, chosen, options, say)
        _output(made, png, as_json)

    verb.__name__, verb.__doc__ = study.name, study.question
    return verb


for _study in STUDIES.values():
    app.command(_study.name)(_verb(_study))


@app.command("show")
def show_stored(
    study: str | None = typer.Argument(
        None,
        metavar="[ID]",
        help="The study's id, or its first characters. Default: list all studies.",
    ),
    png: Picture = None,
    as_json: AsJson = False,
) -> None:
    """List the studies of this host, or show one again."""
    from benchmarks.studies import results
    from farm.addons.pages import plots

    if png is not None:
        if study is None:
            raise UsageError(
                "--png needs the id of the study to draw.",
                f"Give the id: `{PROGRAM} show ID --png FILE`.",
            )
        plots.check_path(png)
    if study is not None:
        _output(results.find_kept(study), png, as_json)
        return
    found = results.kept(say)
    keys = ("id", "study", "variant", "card", "quick", "created_at_s")
    rows = [{key: value for key, value in made.to_json().items() if key in keys} for made in found]
    answer(as_json, {"studies": rows}, lambda: _list(found))


def _output(made: StudyResult, png: Path | None, as_json: bool) -> None:
    """Print the result, then draw it: a failed drawing loses no findings."""
    answer(as_json, made, lambda: _table(made))
    if png is not None:
        from farm.addons.pages import plots

        if charts := made.drawable:
            plots.draw_charts(charts, png, made.title)
            say(f"Drawn to {png}")
        else:
            say(f"This study has no chart: {png} is not written.")


def _table(made: StudyResult) -> RenderableType:
    """Title, table, notes, failures, and the number of readings."""
    rows = made.rows
    # A column without any value is left out, as power on a card that does not report it.
    columns = [
        column for column in made.columns if any(row.get(column.key) is not None for row in rows)
    ]
    found = tables.ruled(
        [
            ("" if column.kind == "text" else ">") + column.head.replace(", ", "\n")
            for column in columns
        ],
        ([_cell(column, row.get(column.key)) for column in columns] for row in rows),
        drops=[column.head.replace(", ", " ") for column in columns[:1:-1]],
    )
    named = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"))
    versions = [f"{name} {made.software[key]}" for name, key in named if made.software.get(key)]
    parts: list[RenderableType] = [
        Text(made.title, style="bold"),
        tables.hanging(made.question, "dim"),
        tables.hanging(f"{made.card.id}; {', '.join(versions)}", "dim"),
        Text(),
        found,
        Text(),
        *map(tables.hanging, made.notes),
    ]
    for subject, reason in list(made.unmeasured.items())[:_MOST_FAILURES]:
        parts.append(tables.hanging(f"not measured: {subject}: {reason}", "yellow"))
    if (left := len(made.unmeasured) - _MOST_FAILURES) > 0:
        parts.append(Text(f"  and {left} more; --json lists all", style="dim"))
    kept = (
        f"{len(made.readings)} readings stored as study {made.id}; {span(made.card_time_s)} of "
        "card time"
    )
    return Group(*parts, tables.hanging(kept, "dim"))


def _list(studies: Sequence[StudyResult]) -> RenderableType:
    """The studies of this host as a table."""
    if not studies:
        return Text(f"No studies yet. Start one with `{PROGRAM} windows --quick`.")
    rows = []
    for made in studies:
        quick, age = "quick" if made.quick else "", span(time.time() - made.created_at_s)
        rows.append((made.id, made.study, str(made.variant), made.card.model, quick, age))
    return tables.ruled(
        ("id", "study", "model", "card", "", ">age"), rows, drops=("age", "", "card")
    )


def _cell(column: ResultColumn, value: Any) -> str:
    formats: dict[str, Callable[[Any], str]] = {
        "time_us": lambda value: quantity(value, TIME, 4),
        "energy_mj": lambda value: quantity(value, ENERGY, 4),
        "power_w": lambda value: quantity(value, POWER),
        "seconds": lambda value: f"{value:.2g} s",
        "change": lambda value: f"{value * 100:+.2f} %",
        "share": lambda value: percent(value, 2),
        "count": lambda value: f"{value:g}",
    }
    return NOTHING if value is None else formats.get(column.kind, str)(value)


if __name__ == "__main__":
    app(prog_name=PROGRAM)
