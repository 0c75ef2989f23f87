"""Details of a reading by the names of their fields, whatever part they belong to."""

from __future__ import annotations

from typing import Any

from farm.types.details import PARTS, REASON_KEYS, Details
from farm.types.fields import names_of


def details_with(**fields: Any) -> Details:
    """Make details: ``details_with(copies=9, in_order_missing="its flags")``."""
    reasons = {key: figure for figure, key in REASON_KEYS.items()}
    parts: dict[str, dict[str, Any]] = {}
    missing, others = {}, {}
    for name, value in fields.items():
        part = next((part for part, kind in PARTS.items() if name in names_of(kind)), None)
        if name in reasons:
            missing[reasons[name]] = value
        elif part is not None:
            parts.setdefault(part, {})[name] = value
        else:
            others[name] = value
    made = {part: PARTS[part](**values) for part, values in parts.items()}
    return Details(**made, **others, missing=missing)
