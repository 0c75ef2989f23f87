"""The software versions of a reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from typing import Any, Self

from farm.types.fields import ContentAddressed, content_id, declared, original


@dataclass(frozen=True)
class Software(ContentAddressed):
    """The software versions of a reading. Only readings with the same software are compared."""

    torch: str = original(MISSING, "version of PyTorch")
    torchvision: str = original("", "version")
    cuda: str = original("", "version that torch was built with")
    cudnn: str = original("", "version")
    driver: str = original("", "version")
    python: str = original("", "version", note="not part of the software's identity")
    platform: str = original("", "the host's system", note="not part of the software's identity")
    communication: str = declared(
        "",
        "of a reading on several cards: communication library, link between the cards, and "
        "settings of the environment"
        " that change the algorithm",
        note="empty: one card",
    )

    @property
    def id(self) -> str:
        # The versions of Python and the operating system do not affect the kernels on the card.
        # The tuples of torchvision's own operators name its version.
        kept = {"torch": self.torch, "cuda": self.cuda, "cudnn": self.cudnn, "driver": self.driver}
        return content_id(
            kept | ({"communication": self.communication} if self.communication else {})
        )

    @property
    def of_one_card(self) -> Self:
        """The software of readings on one card."""
        return dataclasses.replace(self, communication="")


def software_values(of: Iterable[Any], name: str) -> set[str]:
    """The values of a field that readings differ in. Only readings on several cards have a
    communication library.
    """
    values = {str(vars(software)[name]) for software in of}
    if name == "communication":
        values.discard("")
    return values
