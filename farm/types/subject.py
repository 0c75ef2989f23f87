"""The measured object of a reading, as the farm sends it to a benchmark process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from farm.types.fields import Record
from farm.types.variant import Variant


@dataclass(frozen=True)
class Subject(Record):
    """The measured object of a reading: an operator tuple or a model variant, as JSON."""

    kind: Literal["operator", "variant"]
    id: str
    spec: dict[str, Any]
    # only for a variant with a text: `farm.types.tokens.Tokens` as JSON
    tokens: dict[str, Any] | None = None
    # only for a variant with generated kernels and for its tuples: `kernel_source` of
    # `farm.store.captures`
    compiled: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """True if it is a whole model or step, False if it is an operator tuple."""
        return self.kind == "variant"

    @property
    def variant(self) -> Variant:
        """The variant of a whole model or step."""
        return Variant.from_json(self.spec)

    @property
    def built_variant(self) -> Variant | None:
        """The model that a process builds to measure it: the variant itself, or the compiled model
        of a tuple. None for other tuples."""
        source = (self.compiled or {}).get("variant")
        if source is not None:
            return Variant.from_json(source)
        return self.variant if self.whole else None
