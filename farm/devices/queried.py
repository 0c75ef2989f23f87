"""A device whose getters are queries of a driver's library, as of NVML and AMD SMI."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from farm.devices.device import Card, Device


class QueriedDevice(Device):
    """A device whose getters are `queries` of a driver's library: getter -> a function of the
    library's handle.

    If the first query of a sensor fails for any reason, or a later one for lack of the sensor, it
    is not queried again."""

    queries: ClassVar[Mapping[str, Callable[[Any], Any]]]

    def __init_subclass__(cls) -> None:
        for name in cls.queries:
            setattr(cls, name, functools.partialmethod(cls._query, name))

    def __init__(self, card: Card, handle: Any, lacks: frozenset[str] = frozenset()) -> None:
        self.card = card
        self._handle = handle
        self._open = True
        self._lacks = set(lacks)
        for name in self.queries:
            if self._query(name) is None:
                self._lacks.add(name)

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(self.queries) - self._lacks

    def _query(self, name: str) -> Any:
        if name in self._lacks or not self._open:
            return None
        try:
            return self.queries[name](self._handle)
        except Exception as error:
            is_lacking = self._is_lacking(error)
            if is_lacking is None:
                raise
            if is_lacking:
                self._lacks.add(name)
        return None

    @abstractmethod
    def _is_lacking(self, error: Exception) -> bool | None:
        """True if the card will never support the query, False for an error in passing, None for
        another error.
        """

    def close(self) -> None:
        self._open = False
