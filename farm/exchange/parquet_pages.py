"""The sizes of the pages of a Parquet file, from the headers of the pages, before anything is
decompressed.

A reader allocates the unpacked size that a page's header states, whatever the file's metadata
state. PyArrow does not show these headers. They are Thrift structures in the compact protocol, of
which this module reads two numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MOST_HEADER_BYTES = 1 << 16  # a header has at most two values of a column, as statistics
_MOST_DEPTH = 8
# Numbers of fields of a page's header.
_UNPACKED_BYTES, _PACKED_BYTES = 2, 3
# Types of the compact protocol.
_STOP, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = 0, 3, (4, 5, 6), 7, 8, (9, 10), 12
_BOOLEANS = (1, 2)


class DamagedPage(ValueError):
    """The bytes at a page's place are not the header of a page."""


def page_sizes(file: IO[bytes], chunk: pq.ColumnChunkMetaData) -> Iterator[int]:
    """Yield the unpacked size of each page of a column in one row group, in bytes. Raises
    `DamagedPage`."""
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
        begin = chunk.dictionary_page_offset
    end = begin + chunk.total_compressed_size
    while begin < end:
        file.seek(begin)
        header = _Header(file.read(min(MOST_HEADER_BYTES, end - begin)))
        numbers = header.integers()
        unpacked_bytes = numbers.get(_UNPACKED_BYTES, -1)
        packed_bytes = numbers.get(_PACKED_BYTES, -1)
        if unpacked_bytes < 0 or packed_bytes < 0:
            raise DamagedPage("a page has no size")
        yield unpacked_bytes
        begin += header.position + packed_bytes


@dataclass
class _Header:
    """Reads a structure of the compact protocol."""

    data: bytes
    position: int = dataclasses.field(default=0, init=False)

    def integers(self) -> dict[int, int]:
        """Read the structure. Return the number of a field -> its value, for fields that are
        integers.
        """
        integers: dict[int, int] = {}
        number = 0
        while True:
            first = self._byte()
            field_type = first & 15
            if field_type == _STOP:
                return integers
            step = first >> 4
            number = number + step if step else _signed(self._varint())
            if field_type in _INTEGERS:
                integers[number] = _signed(self._varint())
            elif field_type not in _BOOLEANS:  # the type of a boolean is its value
                self._skip(field_type, 0)

    def _byte(self) -> int:
        if self.position >= len(self.data):
            raise DamagedPage("the header of a page does not end")
        self.position += 1
        return self.data[self.position - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise DamagedPage("a number in the header of a page is too long")

    def _skip(self, field_type: int, depth: int) -> None:
        """Skip a value of a type. In a list, a boolean is a byte."""
        if depth > _MOST_DEPTH:
            raise DamagedPage("the header of a page is nested too deeply")
        if field_type in _BOOLEANS or field_type == _BYTE:
            self.position += 1
        elif field_type in _INTEGERS:
            self._varint()
        elif field_type == _DOUBLE:
            self.position += 8
        elif field_type == _BINARY:
            length = self._varint()
            self.position += length
        elif field_type in _LISTS:
            self._skip_list(depth)
        elif field_type == _STRUCT:
            self._skip_struct(depth)
        else:  # a header has no maps
            raise DamagedPage(f"the header of a page has a value of type {field_type}")

    def _skip_list(self, depth: int) -> None:
        first = self._byte()
        count = first >> 4
        if count == 15:
            count = self._varint()
        for _ in range(min(count, MOST_HEADER_BYTES)):
            self._skip(first & 15, depth + 1)

    def _skip_struct(self, depth: int) -> None:
        while (first := self._byte()) & 15 != _STOP:
            if first >> 4 == 0:
                self._varint()
            if first & 15 not in _BOOLEANS:
                self._skip(first & 15, depth + 1)


def _signed(value: int) -> int:
    """A number from its zigzag form."""
    return (value >> 1) ^ -(value & 1)
