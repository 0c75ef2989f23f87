"""``farm doctor``: checks of this host and its farm, with what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from cli import tables
from cli.options import AsJson
from cli.output import console, emit_json, writing
from cli.tables import Text
from farm.types.format import plural

if TYPE_CHECKING:
    from farm.doctor import Check


def doctor(as_json: AsJson = False) -> None:
    """Check this host and its farm: each line says ok, or what to do."""
    from farm.doctor import problem
    from farm.doctor.database import database_checks
    from farm.doctor.host import host_checks
    from farm.settings import NEXT_STEP, settings_but_wrong_ones

    current, wrong = settings_but_wrong_ones()
    checks = [problem("settings", one, NEXT_STEP) for one in wrong]
    if not wrong:  # else the other checks use defaults, and the broker is not asked
        from tasks.broker_checks import broker_checks

        checks += broker_checks(current)
    checks += [*database_checks(current), *host_checks(current)]
    levels = Counter(check.level for check in checks)
    counts = {level: levels[level] for level in ("ok", "warning", "problem")}
    if as_json:
        emit_json({"checks": [check.to_json() for check in checks], "counts": counts})
    else:
        with writing():
            _print(checks, counts)
    if counts["problem"]:
        raise typer.Exit(1)


def _print(checks: Sequence[Check], counts: Mapping[str, int]) -> None:
    out = console()
    width = max(len(check.name) for check in checks)
    marks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}
    for check in checks:
        word, style = marks[check.level]
        line = tables.grid(3)
        tables.row(line, Text(word, style), Text(f" {check.name:{width}} "), check.message)
        if check.next_step and check.level != "ok":
            tables.row(line, "", "", f"→ {check.next_step}")
        out.print(line)
    told = [f"{counts[level]} {plural(level, counts[level])}" for level in ("warning", "problem")]
    out.print(Text(f"{counts['ok']} ok, " + ", ".join(told)))
