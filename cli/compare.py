"""``farm compare``: differences between jobs, sets of readings, or models measured in paired
rounds.

With ``--fail-above`` the command is a gate for CI: it fails if a cost rose by more than a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from cli import lists, output
from cli.options import AsJson, CliOptions, Declared, options_of_run
from cli.output import answer, say
from farm.errors import UsageError

if TYPE_CHECKING:
    from sqlmodel import Session

    from cli.interruption import Ending
    from farm.report.comparison import SideComparison
    from farm.report.gate import Gate, Judgement
    from farm.requests.partial_request import PartialRequest

FOR_CI = ("markdown", "junit")
FORMATS = ("table", "json", *FOR_CI)
_NONE_GIVEN: Mapping[str, Any] = MappingProxyType({})
_OF_COMPARE = {"card": "--card", "dry_run": "--dry-run", "check": "--check", "as_json": "--json"}


def compare(
    first: str,
    second: str = "",
    fail_above: str | None = None,
    scope: str | None = None,
    min_share: str | None = None,
    run: bool = False,
    rounds: int = 6,
    card: list[str] | None = None,
    limit: int = 20,
    shape: str = "table",
    quick: bool = False,
    html: Path | None = None,
    given: Annotated[Mapping[str, Any], Declared("request")] = _NONE_GIVEN,
    as_json: AsJson = False,
) -> None:
    """Compare two jobs or two sets of readings: whole models, sums, operator types and tuples; or
    the schemes of quantisation of one model over its sizes."""
    from farm.report.gate import Gate

    if not second:
        _check_of_model(given, fail_above or scope or min_share, shape)
        from cli.schemes import compare_schemes

        as_json = as_json or shape == "json"
        options = CliOptions([first], None, given, quick, card, as_json=as_json)
        compare_schemes(options, run=run, limit=limit, html=html)
        return
    if given or quick or html:
        raise UsageError(
            "Options of a model and --html are for the comparison of one model.",
            "Omit B, or put the options into A and B: 'resnet50 -b 32 --quick'.",
        )
    gate = Gate.parse(fail_above, scope, min_share)
    shape = "json" if as_json else shape
    if shape not in FORMATS:
        raise UsageError(
            f"--format '{shape}' is not known.", f"Choose one of {', '.join(FORMATS)}."
        )
    if run:
        from cli.interruption import interruptible

        sides = _model("A", first), _model("B", second)
        interruptible(lambda ending: _paired(*sides, gate, rounds, card, shape, ending))
        return
    if card:
        raise UsageError("--card is for --run.", "Filters name a card: 'card=H200'.")
    if fail_above is None and (scope or min_share):
        raise UsageError(
            "--scope and --min-share are for --fail-above or --run.", "Add --fail-above 3%."
        )
    _compare_stored(first, second, gate if fail_above or shape in FOR_CI else None, shape, limit)


def _compare_stored(first: str, second: str, gate: Gate | None, shape: str, limit: int) -> None:
    """Compare two jobs or two sets of readings, and judge the comparison by a gate."""
    from farm.report.compare import compare as compare_sides
    from farm.report.gate import judge

    def ask(session: Session) -> tuple[SideComparison, Judgement | None]:
        comparison = compare_sides(session, first, second)
        return comparison, judge(session, comparison, gate) if gate else None

    comparison, judged = output.first_that_knows(ask)
    shown = {**comparison.to_json(), "gate": judged.to_json()} if judged else comparison
    texts = (comparison.a.text, comparison.b.text)
    _show(shape, shown, judged, texts, lambda: lists.comparison(comparison, limit))
    if judged is not None:
        if judged.left_out:
            say(judged.left_out)
        judged.check()


def _check_of_model(given: Mapping[str, Any], gate: str | None, shape: str) -> None:
    """Raise `UsageError` if options do not suit the comparison of one model."""
    if not given:
        raise UsageError(
            "There is nothing to compare A with.",
            "Give B, or schemes and sizes of a model: --quantize none,int8-weights -b 1,8,64.",
        )
    if gate or shape in FOR_CI:
        raise UsageError(
            "A gate and its formats need two sides.", "Give A and B, each with its options."
        )


def _show(
    shape: str, data: Any, judged: Judgement | None, sides: tuple[str, str], view: Callable[[], Any]
) -> None:
    if judged is not None and shape in FOR_CI:
        text = judged.markdown(*sides) if shape == "markdown" else judged.junit()
        for line in text.splitlines():
            output.emit(line)
    else:
        answer(shape == "json", data, view)


def _model(side: str, text: str) -> PartialRequest:
    options = options_of_run(text)
    chosen = vars(options)
    outer = [flag for name, flag in _OF_COMPARE.items() if chosen[name]]
    if outer:
        raise UsageError(
            f"{side} has {outer[0]}, which is for the whole comparison.",
            f"Put {outer[0]} after A and B.",
        )
    requests = options.requests()
    if len(requests) != 1:
        raise UsageError(
            f"{side} names {len(requests)} models or sizes: {text}", "Name one model with one size."
        )
    return requests[0]


def _paired(
    a: PartialRequest,
    b: PartialRequest,
    gate: Gate,
    rounds: int,
    card: list[str] | None,
    shape: str,
    ending: Ending,
) -> None:
    from cli.run import measure
    from farm.report.gate import Gate, judge_jobs, round_values
    from tasks.paired import paired_rounds
    from tasks.submissions import Submissions

    chosen = output.chosen_own_cards(card or [])[0]
    paired = paired_rounds(a, b, chosen, rounds)
    output.say_differences(paired.sides.values())
    with output.writable_database() as database:

        def measured(number: int, a_job: str, b_job: str) -> None:
            with database.read() as session:
                values = round_values(session, a_job, b_job, Gate())
            wholes = [
                (key[0], value.b.value / value.a.value - 1)
                for key, value in values.items()
                if key[1] == "whole"
            ]
            changes = ", ".join(f"{quantity} {change * 100:+z.1f} %" for quantity, change in wholes)
            say(f"round {number} of {rounds}: whole model {changes or 'without a sound reading'}")

        measure(database, paired.batches(database, measured), [chosen], Submissions(say), ending)
        with database.read() as session:
            compared = judge_jobs(session, str(chosen), paired.complete, gate)
    _show(shape, compared, compared.judgement, compared.titles, lambda: lists.paired(compared))
    compared.judgement.check()
