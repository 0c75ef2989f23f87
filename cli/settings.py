"""``farm settings``: the current settings, and the source of each value."""

from __future__ import annotations

from typing import Any

from cli.options import AsJson
from cli.output import emit_json, show

_SECRETS = ("flower_basic_auth",)


def settings(as_json: AsJson = False) -> None:
    """Show the settings in force; secrets are masked."""
    from farm.settings import settings as in_force

    rows = [
        {"setting": name, "variable": f"FARM_{name.upper()}", "value": _shown(name, value), "source": _source(name)}
        for name, value in in_force().model_dump(mode="json").items()
    ]
    derived = {"database": in_force().database, "cpu_card_id": in_force().cpu_card_id}
    rows += [
        {"setting": name, "variable": "", "value": _shown(name, value), "source": "derived"}
        for name, value in derived.items()
    ]
    if as_json:
        emit_json({"settings": rows})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "source"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row["setting"], str(row["value"]) if row["value"] != "" else "-", row["source"])
    show(table)


def _shown(name: str, value: Any) -> Any:
    """Return the value with passwords masked."""
    from farm.types.format import masked

    if name in _SECRETS:
        return "***" if value else ""
    return masked(value) if isinstance(value, str) else value


def _source(name: str) -> str:
    import os

    from farm.settings import settings as in_force

    if any(key.upper() == f"FARM_{name.upper()}" for key in os.environ):
        return "environment"
    if name in in_force().model_fields_set:
        return "file"
    return "default"
