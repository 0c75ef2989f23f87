"""The columns of the database's tables, for queries that return plain rows: faster than objects for
many rows.
"""

from __future__ import annotations

from typing import Any

from farm.store import tables


def columns_of(table: Any) -> Any:
    return table.__table__.columns


CALL = columns_of(tables.Call)
CAPTURE = columns_of(tables.Capture)
CARD = columns_of(tables.CardRow)
IMPORTED_VERDICT = columns_of(tables.ImportedVerdict)
ITEM = columns_of(tables.Item)
JOB = columns_of(tables.Job)
OPERATOR = columns_of(tables.Operator)
PROTOCOL = columns_of(tables.ProtocolRow)
READING = columns_of(tables.ReadingRow)
ROUND = columns_of(tables.Round)
SOFTWARE = columns_of(tables.SoftwareRow)
VARIANT = columns_of(tables.ModelVariant)
VERDICT = columns_of(tables.VerdictRow)

#: The items that run a whole model, also those that only list its kernels.
RUN_WHOLES = ITEM.subject_kind == "variant"
#: The items that end with a reading: not those that only list kernels.
HAVE_READINGS = ITEM.role != tables.ItemRole.COMPILE
#: The variants with generated kernels (`Variant.generates_kernels`).
GENERATE_KERNELS = VARIANT.compile != ""
#: The readings of tuples, and of whole models.
OF_TUPLES = READING.subject_kind == "operator"
OF_WHOLES = READING.subject_kind == "variant"
#: The cards that are no simulated ones.
REAL_CARDS = CARD.kind != "simulated"
