"""Which cards this host has, and the live device behind one of them.

No torch here: workers and the command line list cards without it.
"""

from __future__ import annotations

from farm.devices import cpu, nvidia, simulated
from farm.devices.device import Card, Device
from farm.errors import NoSuchCard
from farm.settings import Settings


def discover(settings: Settings) -> list[Card]:
    """The cards of this host: simulated ones if the settings ask for them, else its GPUs, else its CPU.

    GPUs hidden by CUDA_VISIBLE_DEVICES (as Slurm does) are left out. A card that is there but cannot be measured
    on (a GPU in MIG mode, or one that does not answer) is listed with its `refusal`; the CPU is no card in its place.
    """
    if settings.simulated_cards:
        return simulated.simulated_cards(settings)
    return nvidia.visible_cards(nvidia.nvidia_cards(settings), settings) or [cpu.cpu_card(settings)]


def find_card(card_id: str, settings: Settings) -> Card:
    """The card of this host with that id.

    Raises:
        NoSuchCard: no such card here, or it refuses to be measured on; the message says why.
    """
    if card_id.startswith("SIM-"):
        candidates = simulated.simulated_cards(settings)
    elif card_id.startswith("CPU-"):
        candidates = [cpu.cpu_card(settings)]
    else:
        candidates = nvidia.nvidia_cards(settings)
    for card in candidates:
        if card.id == card_id:
            if card.refusal:
                raise NoSuchCard(f"The card {card} cannot be measured on: {card.refusal}", "Choose another card.")
            return card
    if silent := [card for card in candidates if card.id.startswith(nvidia.WITHOUT_UUID)]:
        told = "; ".join(f"{card}: {card.refusal}" for card in silent)
        raise NoSuchCard(f"No card of this host ({settings.host}) that answers is '{card_id}'. {told}", "Mend that.")
    raise NoSuchCard(f"This host ({settings.host}) has no card '{card_id}'.", "List its cards with `farm cards`.")


def open_device(card: Card) -> Device:
    """The live device behind a card.

    Raises:
        NoSuchCard: the card refuses to be measured on, or is gone.
    """
    if card.refusal:
        raise NoSuchCard(f"The card {card} cannot be measured on: {card.refusal}", "Choose another card.")
    if card.kind == "cuda":
        return nvidia.NvidiaDevice(card)
    if card.kind == "cpu":
        return cpu.CpuDevice(card)
    return simulated.SimulatedDevice(card)
