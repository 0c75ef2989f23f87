"""The contract of a vendor: the module that finds, opens and hides the cards of one kind.

`farm.devices.host` has the table of vendors (`VENDORS`), and is the only place that chooses between
them. To add a vendor, write a module with one subclass of `Vendor`, and add it to the table:

    class ExampleVendor(Vendor):
        name = "Example"
        kind = "cuda"

        def serves(self, torch):
            return torch is not None and torch.version.endswith("+example")

        def cards(self, settings):
            return [Card("GPU-0", "cuda", "Example 1", 2**30, host=settings.host)]

        def open(self, card):
            return ExampleDevice(card)

A vendor keeps these rules, which `tests/devices/test_contract.py` checks for every vendor of the
table:

- `cards` raises nothing. A card that cannot be measured is in the list with its ``refusal``; a host
  without the vendor's driver has no cards.
- `open` raises `farm.errors.NoSuchCard` if the card no longer answers.
- No method imports torch or creates a context on a card.
- `visible_only` of a vendor of GPUs hides the other cards: a process measures on the first card
  that it sees (``cuda:0``). A vendor that never has more than one card may leave it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from farm.devices.device import Card, Device
from farm.devices.software import Installed
from farm.settings import Settings
from farm.types.card_kind import CardKind
from farm.types.error_counters import ErrorCounters
from farm.types.software import Software


class Vendor(ABC):
    """Finds and opens the cards of one vendor."""

    name: ClassVar[str]  # as people call the vendor: "NVIDIA"
    kind: ClassVar[CardKind]  # of all its cards

    def serves(self, torch: Installed | None) -> bool:
        """True if the installed torch (None: none) measures on the vendor's cards."""
        return True

    @abstractmethod
    def cards(self, settings: Settings) -> list[Card]:
        """All cards of this host, in the driver's order; [] without a driver."""

    def visible_cards(self, settings: Settings) -> list[Card]:
        """The cards that the environment of this process does not hide."""
        return self.cards(settings)

    @abstractmethod
    def open(self, card: Card) -> Device:
        """Open the device of a card of this vendor. Raises `NoSuchCard` if it does not answer."""

    def links(self, card: Card) -> dict[str, Any]:
        """The links of a card to other cards of its host, see `farm.devices.host.links_of`."""
        return {}

    def error_counters(self, card: Card) -> ErrorCounters | None:
        """The error counters of a card, see `farm.devices.host.error_counters`."""
        return None

    def link_between(self, card_ids: Sequence[str]) -> tuple[str, float | None]:
        """The link between cards, see `farm.devices.host.link_between`."""
        return "", None

    def visible_only(self, card_ids: Sequence[str]) -> dict[str, str]:
        """The environment variables that show a process only these cards; [] hides all."""
        return {}

    def is_installed(self, software: Software, card: Card, torch: Installed) -> bool:
        """True if the software that a worker registered for a card is still installed."""
        return software.torch == torch.version

    def note_about(self, model: str) -> str:
        """What a user should know about readings of a card model; "" if nothing."""
        return ""
