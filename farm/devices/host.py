"""Find the cards of this host and open their devices: the table of vendors, and nothing else.

This module does not import torch, which takes seconds and may be broken."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from farm.devices import software
from farm.devices.amd import Amd
from farm.devices.cpu import Cpu
from farm.devices.device import Card, Device
from farm.devices.nvidia import Nvidia
from farm.devices.simulated import Simulated
from farm.devices.vendor import Vendor
from farm.errors import FarmUnavailable, NoSuchCard
from farm.settings import Settings
from farm.types.card_kind import CardKind, card_kind_of
from farm.types.error_counters import ErrorCounters
from farm.types.software import Software

#: The vendors, in the order in which `discover` looks for cards. The first of a kind that serves
#: the installed torch has the cards of this kind.
VENDORS: tuple[Vendor, ...] = (Simulated(), Amd(), Nvidia(), Cpu())

SHARED_MEMORY_STEP = (
    "Mount a tmpfs at /dev/shm with mode 1777. In a container: `docker run --shm-size 1g`."
)


def vendor_of(kind: CardKind) -> Vendor:
    """The vendor of this host's cards of a kind."""
    torch = software.installed_torch()
    return next(vendor for vendor in _vendors_of(kind) if vendor.serves(torch))


def _vendors_of(kind: str) -> list[Vendor]:
    return [vendor for vendor in VENDORS if vendor.kind == kind]


def discover(settings: Settings) -> list[Card]:
    """The cards of this host: simulated cards if the settings request them, else its GPUs, else its
    CPU.

    The GPUs are those of the vendor that the installed PyTorch supports, without GPUs that
    CUDA_VISIBLE_DEVICES hides (Slurm sets it). A GPU that cannot be measured (it is in MIG mode, or
    its driver fails) is in the list with its `refusal`: the CPU is listed only if there is no GPU.
    """
    torch = software.installed_torch()
    cards: list[Card] = []
    for vendor in VENDORS:
        if not cards and vendor.serves(torch):
            cards = vendor.visible_cards(settings)
    return cards


def find_card(card_id: str, settings: Settings) -> Card:
    """The card of this host with that id. Raises `NoSuchCard` with the reason if it is missing or
    not measurable.
    """
    cards = vendor_of(card_kind_of(card_id)).cards(settings)
    for card in cards:
        if card.id == card_id:
            return _measurable(card)
    silent = [card for card in cards if card.refusal and not card.id.startswith("GPU-")]
    if silent:
        reasons = "; ".join(f"{card}: {card.refusal}" for card in silent)
        text = (
            f"This host ({settings.host}) has no card '{card_id}' that answers. Cards that do not "
            f"answer: {reasons}"
        )
        raise NoSuchCard(text, "Repair the cards that do not answer, or choose another card.")
    raise NoSuchCard(
        f"This host ({settings.host}) has no card '{card_id}'.", "List its cards with `farm cards`."
    )


def open_device(card: Card) -> Device:
    """Open the device of a card. Raises `NoSuchCard` if the card has a refusal, or no longer
    responds.
    """
    return vendor_of(card.kind).open(_measurable(card))


def _measurable(card: Card) -> Card:
    if card.refusal:
        raise NoSuchCard(
            f"The farm cannot measure on {card}: {card.refusal}", "Choose another card."
        )
    return card


def links_of(card: Card) -> dict[str, Any]:
    """The links of a card to other cards of its host (`farm.devices.nvidia_links.links`), as far as
    they are known.

    With the key ``communication``: the software with which this card and all its peers communicate,
    as in a reading of them (`Software.communication`)."""
    return vendor_of(card.kind).links(card)


def error_counters(card: Card) -> ErrorCounters | None:
    """The error counters of a card of this host, each with its count or the reason why it could not
    be read; None: the farm knows no counters of this kind of card."""
    return vendor_of(card.kind).error_counters(card)


def link_between(card_ids: Sequence[str]) -> tuple[str, float | None]:
    """The link between cards of this host ("NVLink x18") and its peak in bytes/s in one direction;
    "" if unknown. Raises `NoSuchCard` if two of the cards cannot access each other's memory."""
    return vendor_of("cuda").link_between(card_ids)


def visible_only(gpu_ids: Sequence[str]) -> dict[str, str]:
    """The environment variables that show a process only these GPUs; [] hides all. Set them before
    Python starts.
    """
    return vendor_of("cuda").visible_only(gpu_ids)


def is_installed(registered: Software, card: Card) -> bool:
    """True if the software that a worker registered for this card is still installed; False if it
    is unknown.
    """
    torch = software.installed_torch()
    return torch is not None and vendor_of(card.kind).is_installed(registered, card, torch)


def note_about(kind: str, model: str) -> str:
    """What a user should know about readings of a card model of any host; "" if nothing."""
    notes = [vendor.note_about(model) for vendor in _vendors_of(kind)]
    return next(filter(None, notes), "")


def semaphore_problem() -> str:
    """Why this host cannot create a semaphore, which every worker of a card needs; "" if it can."""
    try:
        multiprocessing.get_context("fork").Lock()
    except (OSError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"a semaphore cannot be created (on Linux, in /dev/shm): {reason}"
    return ""


def check_semaphores() -> None:
    """Raise `FarmUnavailable` if workers cannot start because this host cannot create a
    semaphore.
    """
    reason = semaphore_problem()
    if reason:
        raise FarmUnavailable(f"Workers cannot start: {reason}.", SHARED_MEMORY_STEP)
