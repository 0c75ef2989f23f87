"""The calls of NVML (`pynvml`) that several modules need, with its errors as None."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Use NVML during a block. Raises `pynvml.NVMLError` if there is no driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        optional(pynvml.nvmlShutdown)


def optional(query: Callable[..., T], *arguments: Any) -> T | None:
    """The answer of NVML; None if it has none."""
    try:
        return query(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def field_value(handle: Any, field_id: int) -> int:
    """The value of a field of a card. Raises `pynvml.NVMLError` if the card lacks it."""
    field = pynvml.nvmlDeviceGetFieldValues(handle, [field_id])[0]
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)
