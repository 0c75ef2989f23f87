"""``farm doctor``: checks of this host and its farm, with what to do; ``farm settings``: the
settings in force.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType

from cli import tables
from cli.options import AsJson
from cli.output import answer
from cli.tables import Text
from farm.errors.safe_text import shown_url, without_secrets
from farm.types.format import plural

if TYPE_CHECKING:
    from tasks.doctor import Check


def doctor(as_json: AsJson = False) -> None:
    """Check this host and its farm: each line says ok, or what to do."""
    from farm.settings import NEXT_STEP, settings_but_wrong_ones
    from tasks.doctor import problem
    from tasks.doctor.database import database_checks
    from tasks.doctor.host import host_checks

    current, wrong = settings_but_wrong_ones()
    checks = [problem("settings", message, NEXT_STEP) for message in wrong]
    if not wrong:  # else the other checks use defaults, and the broker is not asked
        try:
            from tasks.doctor.broker import broker_checks

            checks += broker_checks(current)
        except ModuleNotFoundError as error:
            checks.append(
                problem("packages", f"{error.name} is not installed", "pip install operator-farm")
            )
    checks += [*database_checks(current), *host_checks(current)]
    levels = Counter(check.level for check in checks)
    counts = {level: levels[level] for level in ("ok", "warning", "problem")}
    as_data = {"checks": [check.to_json() for check in checks], "counts": counts}
    answer(as_json, as_data, lambda: _shown_checks(checks, counts))
    if counts["problem"]:
        raise typer.Exit(1)


def _shown_checks(checks: Sequence[Check], counts: Mapping[str, int]) -> Group:
    width = max(len(check.name) for check in checks)
    marks = {
        "ok": ("ok     ", "green"),
        "warning": ("warning", "yellow"),
        "problem": ("PROBLEM", "bold red"),
    }
    lines: list[RenderableType] = []
    for check in checks:
        word, style = marks[check.level]
        line = tables.grid(3)
        tables.row(line, Text(word, style), Text(f" {check.name:{width}} "), check.message)
        if check.next_step and check.level != "ok":
            tables.row(line, "", "", f"→ {check.next_step}")
        lines.append(line)
    words = [f"{counts[level]} {plural(level, counts[level])}" for level in ("warning", "problem")]
    return Group(*lines, Text(f"{counts['ok']} ok, " + ", ".join(words)))


def settings(as_json: AsJson = False) -> None:
    """Show the settings in force; URLs are shown without passwords."""
    from farm.settings import settings as in_force

    current = in_force()
    set_here = {key.upper() for key in os.environ}
    rows = []
    for name, value in current.model_dump(mode="json").items():
        variable = f"FARM_{name.upper()}"
        source = "default"
        if variable in set_here:
            source = "environment"
        elif name in current.model_fields_set:
            source = "file"
        rows.append(
            {"setting": name, "variable": variable, "value": _shown(name, value), "source": source}
        )
    derived = {"database": current.database, "cpu_card_id": current.cpu_card_id}
    for name, value in derived.items():
        shown = _shown(name, value)
        rows.append({"setting": name, "variable": "", "value": shown, "source": "derived"})
    columns = ("setting", "setting"), ("value", "value"), ("source", "source")
    answer(as_json, {"settings": rows}, lambda: tables.filled(rows, columns))


def _shown(name: str, value: Any) -> Any:
    """The value without passwords."""
    if name == "flower_basic_auth":
        return "***" if value else ""
    if value and name in ("broker_url", "database_url", "database"):
        return shown_url(value)
    return without_secrets(value) if isinstance(value, str) else value
