"""The token ids of a language model's input. They are sent and stored with a variant. The text
itself is not.

This module does not import torch. It validates data from files, messages and the database, with
bounded sizes."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

from farm.errors import UsageError
from farm.types.fields import LARGEST_NUMBER, content_id, first_problem

if TYPE_CHECKING:
    import numpy as np

#: The largest number of ids of one input: 64 MiB in memory.
MOST_TOKENS = 2**24
SIDES = ("right", "left")


class TokensRejected(ValueError):
    """The data is not stored token ids."""


@dataclass(frozen=True)
class Tokens:
    """The input of a language model: ``batch`` rows of ``length`` ids.

    ``row_lengths`` is the number of ids of text in each row. The rest of a row is padding, on the
    side ``padding``. ``packed`` holds all rows one after the other as little-endian 32-bit
    integers."""

    batch: int
    length: int
    row_lengths: tuple[int, ...]
    padding: str
    packed: bytes

    def __post_init__(self) -> None:
        check_size(self.batch, self.length)
        if self.padding not in SIDES:
            raise TokensRejected(f"padding is {self.padding!r}, neither right nor left")
        if len(self.row_lengths) != self.batch or not all(
            1 <= row <= self.length for row in self.row_lengths
        ):
            raise TokensRejected(
                f"the lengths of the rows are not {self.batch} numbers from 1 to {self.length}"
            )
        if len(self.packed) != self.batch * self.length * 4:
            raise TokensRejected(
                f"the ids have {len(self.packed)} bytes; {self.batch}x{self.length} ids need 4 each"
            )
        if self.ids.min() < 0:
            raise TokensRejected("a token id is below 0")

    @classmethod
    def of_rows(
        cls, rows: Sequence[Sequence[int] | np.ndarray], length: int, *, pad: int, padding: str
    ) -> Self:
        """Create tokens from rows of 1 to `length` ids. Each row is padded to `length`."""
        import numpy as np

        ids = np.full((len(rows), length), pad, dtype="<i4")
        for number, row in enumerate(rows):
            begin = length - len(row) if padding == "left" else 0
            ids[number, begin : begin + len(row)] = row
        return cls(len(rows), length, tuple(map(len, rows)), padding, ids.tobytes())

    @cached_property
    def ids(self) -> np.ndarray:
        """The ids: shape (batch, length), int64, read-only. `torch.from_numpy` needs a copy."""
        import numpy as np

        ids = (
            np.frombuffer(self.packed, dtype="<i4")
            .reshape(self.batch, self.length)
            .astype(np.int64)
        )
        ids.flags.writeable = False
        return ids

    @property
    def mask(self) -> np.ndarray:
        """The attention mask, 1 for text and 0 for padding: shape (batch, length), int64."""
        import numpy as np

        positions = np.arange(self.length)
        if self.padding == "left":
            positions = positions[::-1]
        return (positions[None, :] < np.array(self.row_lengths)[:, None]).astype(np.int64)

    @property
    def padded(self) -> bool:
        return any(row < self.length for row in self.row_lengths)

    @property
    def largest(self) -> int:
        """The largest token id. The model's vocabulary size must be larger."""
        return int(self.ids.max())

    @cached_property
    def id(self) -> str:
        """The content hash. It depends on the ids, not on their compressed form."""
        return content_id({**self._sizes(), "ids": hashlib.sha256(self.packed).hexdigest()})

    def _sizes(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "length": self.length,
            "row_lengths": list(self.row_lengths),
            "padding": self.padding,
        }

    def compressed(self) -> bytes:
        """The ids as stored in the database; see `of_compressed`."""
        return zlib.compress(self.packed, 6)

    @classmethod
    def of_compressed(
        cls, batch: int, length: int, row_lengths: Sequence[int], padding: str, compressed: bytes
    ) -> Self:
        """Decompress at most this size. Raises `TokensRejected` if the data is not an input of this
        size.
        """
        try:
            check_size(batch, length)
        except UsageError as error:  # as of a user's input, with its next step
            raise TokensRejected(error.message) from error
        size = batch * length * 4
        try:
            packed = zlib.decompressobj().decompress(compressed, size + 1)
        except zlib.error as error:
            raise TokensRejected(f"the ids are damaged ({error})") from error
        return cls(batch, length, tuple(row_lengths), padding, packed)

    def to_json(self) -> dict[str, Any]:
        return {**self._sizes(), "ids": base64.b64encode(self.compressed()).decode()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises `TokensRejected` for any other data."""
        # late: only stored ids need it
        from pydantic import (
            Base64Bytes,
            StrictInt,
            ValidationError,
            create_model,
        )

        sizes = {
            "batch": StrictInt,
            "length": StrictInt,
            "row_lengths": list[StrictInt],
            "padding": str,
        }
        form = cast(Any, create_model)(
            "ids", __config__={"extra": "forbid"}, **sizes, ids=Base64Bytes
        )
        try:
            values = form.model_validate(data)
        except ValidationError as error:
            raise TokensRejected(first_problem(error)) from error
        return cls.of_compressed(
            values.batch, values.length, values.row_lengths, values.padding, values.ids
        )


def check_size(batch: int, length: int) -> None:
    """Raise `UsageError` if a size is below 1, or if the input is too large."""
    for what, value, step in (
        ("batch", batch, "Give -b 1 or more."),
        ("length", length, "Give --length 128, for example."),
    ):
        if not 1 <= value <= LARGEST_NUMBER:
            raise UsageError(f"The {what} is {value}; it must be from 1 to {LARGEST_NUMBER}.", step)
    if batch * length > MOST_TOKENS:
        raise UsageError(
            f"An input of {batch}x{length} tokens has {batch * length} tokens; at most "
            f"{MOST_TOKENS} are allowed.",
            "Choose a smaller batch or length.",
        )
