"""``farm settings``: the current settings, and the source of each value."""

from __future__ import annotations

import os
from typing import Any

from cli.options import AsJson
from cli.output import emit_json, show


def settings(as_json: AsJson = False) -> None:
    """Show the settings in force; secrets are masked."""
    from farm.settings import settings as in_force

    current = in_force()
    set_here = {key.upper() for key in os.environ}
    rows = []
    for name, value in current.model_dump(mode="json").items():
        variable = f"FARM_{name.upper()}"
        source = "environment" if variable in set_here else "file" if name in current.model_fields_set else "default"
        rows.append({"setting": name, "variable": variable, "value": _shown(name, value), "source": source})
    for name in ("database", "cpu_card_id"):
        value = _shown(name, getattr(current, name))
        rows.append({"setting": name, "variable": "", "value": value, "source": "derived"})
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

    if name == "flower_basic_auth":
        return "***" if value else ""
    return masked(value) if isinstance(value, str) else value
