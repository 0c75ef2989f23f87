"""What memory a card reaches beyond its own. Told without torch."""

from __future__ import annotations

import os
from pathlib import Path

from farm.devices.device import Card

NODES = Path("/sys/devices/system/node")
ONE_NODE = "This host has one NUMA node: none of its memory is slower than the other."


def no_slow_memory(card: Card, nodes: Path = NODES) -> str:
    """Why a card of this host has no slow memory; "" where it has, or where only the card itself can tell."""
    return ONE_NODE if card.kind == "cpu" and farthest_node(nodes) is None else ""


def farthest_node(nodes: Path = NODES) -> int | None:
    """The NUMA node whose memory is farthest from the cores that this process runs on; None where there is but one."""
    own = min(os.sched_getaffinity(0))
    folders = sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    if len(folders) < 2:
        return None
    here = next((folder for folder in folders if (folder / f"cpu{own}").exists()), folders[0])
    distances = list(map(int, (here / "distance").read_text().split()))
    far = max(range(len(folders)), key=lambda place: distances[place])
    return int(folders[far].name[4:])
