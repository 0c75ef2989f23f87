"""HTML tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from farm.errors.safe_text import printable


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> str:
    """Return the HTML of a table, with all text escaped."""

    def text(value: Any) -> str:
        return html.escape(printable(str(value)))

    def cells(tag: str, values: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{text(value)}</{tag}>" for value in values) + "</tr>"

    head, body = cells("th", columns), "".join(cells("td", row) for row in rows)
    made = (
        f"<table><caption>{text(title)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
    )
    return made + (f"<p>{text(note)}</p>" if note else "")
