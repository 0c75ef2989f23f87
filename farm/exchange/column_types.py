"""Pydantic types of the values that an import accepts in a column (`farm.store.data_columns`).

A file of another farm can hold anything. So texts and documents have a largest size, numbers are
finite, and operator tuples are validated by `farm.types.tuple`. A validator raises ValueError or
FarmError."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    create_model,
)

from farm.errors.safe_text import printable
from farm.store import content
from farm.store.data_columns import Column
from farm.subjects.parsing import parse
from farm.types import card_kind
from farm.types.details import Burst, CanaryNote, InContext
from farm.types.protocol import Launch
from farm.types.stored import json_model
from farm.types.value_profiles import class_of, is_class
from farm.types.verification import Launches, Verification

MOST_JSON = 16 << 20  # largest length of a JSON document, in characters
#: Finds what `content.storable` would change. Parsing every document instead would take a quarter
#: of an import's time.
_NOT_STORABLE = re.compile(r"\\u(0000|[dD][89abAB])|NaN|Infinity|[eE]\+?\d{3}")


def _printable(text: str) -> str:
    if printable(text) != text or content.storable_text(text) != text:
        raise ValueError("the text has control characters")
    return text


def text(most: int = 300, least: int = 0) -> Any:
    """The type of a text: `least` to `most` characters, none of them control. If `least` is 0, null
    becomes "".
    """
    accepted = Annotated[str, Field(min_length=least, max_length=most), AfterValidator(_printable)]
    if least:
        return accepted
    return Annotated[accepted, BeforeValidator(lambda value: "" if value is None else value)]


def _document(document: Any) -> Any:
    if not isinstance(document, str) or len(document) > MOST_JSON:
        raise ValueError(f"the value is not a JSON document of at most {MOST_JSON} characters")
    try:
        data = json.loads(document)
    except ValueError:
        raise ValueError("the value is not valid JSON") from None
    return content.storable(data) if _NOT_STORABLE.search(document) else data


def document(
    accepted: Any, check: Callable[[Any], object] = lambda data: None, *, as_text: bool = False
) -> Any:
    """The type of a JSON document that is valid as the type `accepted` and for `check`, which
    raises ValueError. The stored value is the document, as text or parsed."""

    @functools.cache
    def adapter() -> TypeAdapter[Any]:
        return TypeAdapter(accepted)

    def checked(value: Any) -> Any:
        data = _document(value)
        adapter().validate_json(value, strict=True)
        check(data)
        return value if as_text else data

    return Annotated[Any, PlainValidator(checked)]


def _some(name: str, **kinds: Any) -> Any:
    """The type of a JSON object. `kinds` has the types of known keys; each key may be missing.
    Others are accepted.
    """
    fields: dict[str, Any] = {key: (kind | None, None) for key, kind in kinds.items()}
    return create_model(name, __config__=ConfigDict(defer_build=True), **fields)


def _check_seen(seen: Sequence[Mapping[str, Any] | None]) -> None:
    for entry in seen:
        if entry is not None and not (entry.get("held") or {"zeros", "least"} <= set(entry)):
            raise ValueError("the statistics of a tensor have no 'zeros' or no 'least'")
    if not is_class(class_of(seen)):
        raise ValueError("no class of data has these statistics")


def _check_verdict(details: Mapping[str, Any]) -> None:
    # late: a lookup of readings does not need it
    from farm.verdict.verdict import (
        VERDICT_SCHEMA,
        Verdict,
    )

    if details.get("schema") == VERDICT_SCHEMA:
        Verdict.from_json(details)


@functools.lru_cache(maxsize=50_000)
def _tuple(value: str) -> Any:
    return parse(_document(value))


Text = text()
Name = text(least=1)
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Names: Any = Annotated[
    list[Name],  # type: ignore[valid-type]
    Field(max_length=64),
    BeforeValidator(lambda value: value or []),
]
#: The details of a reading that a sum needs.
_DETAILS = _some(
    "details",
    **dict.fromkeys(["copies", "found_again", "ceiling_s", "eager_time_us"], float),
    method=Annotated[int, Field(ge=0, lt=10**6)],
    looped_us=dict[str, float],
    burst=json_model(Burst),
    context=json_model(InContext),
    canary=json_model(CanaryNote),
)
#: The numbers of a verification that reports need.
_VERIFICATION = _some(
    "verification",
    # tuple id -> kernel -> launches in one pass
    tuple_kernels=dict[str, Annotated[dict[str, float], Field(max_length=10_000)]],
    kernels=dict[str, Launches],
    in_model=_some("calls", calls_us=dict[str, list[float | None]]),
)
_COMPILED = _some("compiled", choices=dict[str, dict[str, Any]], graph_breaks=dict[str, Count])
_MADE_OF = list[tuple[Id, Literal["tuple", "whole", "canary"], Count, bool]]

#: The types that columns name (`farm.store.data_columns.Column.accepts`).
COLUMN_TYPES: Mapping[str, Any] = {
    "Text": Text,
    "ShortText": text(32),
    "LongText": text(10_000),
    "Name": Name,
    "Path": text(1000),
    "Note": text(1000, 1),
    "CardId": text(80, 1),
    "AnyCardId": text(80),  # "": no card
    "CardKind": card_kind.CardKind,
    "DeviceType": card_kind.DeviceType,
    "JobId": text(16, 1),
    "Launch": Launch,
    "Captured": Literal["predicted", "observed"],
    "Flag": bool,
    "Id": Id,
    "Count": Count,
    "Number": Number,
    "Positive": Annotated[float, Field(ge=0, allow_inf_nan=False)],
    "SomeNames": list[Name],  # type: ignore[valid-type]
    "Numbers": document(Annotated[dict[str, float], Field(max_length=10_000)]),
    "Object": document(dict[str, Any]),
    "RequestText": document(dict[str, Any], as_text=True),
    "Storages": document(list[Count]),
    "Shape": list[Count] | None,
    "Shapes": document(list[list[Count]] | None) | None,
    "Details": document(_DETAILS),
    "Verified": document(_VERIFICATION, Verification.from_json),
    # one entry for each activation, buffer or parameter of a call: the numbers that decide its data
    # class
    "Seen": document(Annotated[list[dict[str, float] | None], Field(max_length=1024)], _check_seen),
    "Compiled": document(_COMPILED),
    "VerdictDetails": document(dict[str, Any], _check_verdict, as_text=True),
    "MadeOf": document(_MADE_OF, as_text=True),
    "Tuple": Annotated[Any, PlainValidator(_tuple)],
}
#: Type of the values of a column -> what an import accepts, if the column declares no type.
OF_TYPE: Mapping[str, Any] = {
    "text": Text,
    "integer": Count | None,
    "number": Number | None,
    "boolean": bool | None,
    "texts": Names,
    "numbers": Annotated[list[float], BeforeValidator(lambda value: value or [])],
}


@functools.cache
def check_of(column: Column) -> Callable[[Any], Any]:
    """Return a function that converts a value of a file to the stored form of a column. It raises
    ValueError or FarmError.
    """
    return TypeAdapter(_type_of(column), config=ConfigDict(strict=True)).validate_python


def _type_of(column: Column) -> Any:
    if not column.accepts:
        return OF_TYPE[column.type]
    accepted = COLUMN_TYPES[column.accepts.removesuffix("?")]
    return accepted | None if column.accepts.endswith("?") else accepted
