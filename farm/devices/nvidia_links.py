"""The links between NVIDIA cards of one host: NVLink and PCI Express, through NVML."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from farm.devices.nvml import field_value, opened, optional
from farm.errors import NoSuchCard

_MOST_LINKS = 36  # NVLinks of one card

#: Bytes/s of one NVLink in one direction (data sheets), by part of the card's name, if the driver
#: does not report it.
_NVLINK_BYTES_PER_S = {
    "V100": 25e9,
    "A100": 25e9,
    "H100": 25e9,
    "H200": 25e9,
    "B200": 50e9,
    "B300": 50e9,
}
#: Bytes/s of one lane of PCI Express in one direction, by generation.
_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def links(card_id: str) -> dict[str, Any]:
    """The active ``nvlinks`` of a card, and the ``peers``, whose memory it can access, as far as
    NVML reports them.
    """
    answers: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError), opened():
        handle = pynvml.nvmlDeviceGetHandleByUUID(card_id)
        number = _nvlinks(handle)
        if number is not None:
            answers["nvlinks"] = number
        for other_id, status in _statuses(card_id, handle):
            peers = answers.setdefault("peers", [])
            if status == pynvml.NVML_P2P_STATUS_OK:
                peers.append(other_id)
    return answers


def _statuses(card_id: str, handle: Any) -> Iterator[tuple[str, int]]:
    """The ids of the other cards, and whether a card can read their memory."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        other = optional(pynvml.nvmlDeviceGetHandleByIndex, index)
        other_id = optional(pynvml.nvmlDeviceGetUUID, other)
        status = _peer_status(handle, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
        if other_id not in (None, card_id) and status is not None:
            yield other_id, status


def _nvlinks(handle: Any) -> int | None:
    """The number of active NVLinks of a card; None if NVML does not report them."""
    states = _nvlink_states(handle)
    if all(state is None for state in states):
        return None
    return states.count(pynvml.NVML_FEATURE_ENABLED)


def active_nvlinks(handle: Any) -> list[int]:
    """The numbers of the active NVLinks of a card. Raises `pynvml.NVMLError` if NVML does not
    report them.
    """
    pynvml.nvmlDeviceGetNvLinkState(handle, 0)
    states = enumerate(_nvlink_states(handle))
    return [number for number, state in states if state == pynvml.NVML_FEATURE_ENABLED]


def _nvlink_states(handle: Any) -> list[int | None]:
    return [
        optional(pynvml.nvmlDeviceGetNvLinkState, handle, number) for number in range(_MOST_LINKS)
    ]


def link_between(card_ids: Sequence[str]) -> tuple[str, float | None]:
    """See `farm.devices.host.link_between`. A user who switches peer access off (NCCL_P2P_DISABLE)
    needs none.
    """
    with contextlib.suppress(pynvml.NVMLError), opened():
        handles = {}
        for card_id in card_ids:
            handle = optional(pynvml.nvmlDeviceGetHandleByUUID, card_id)
            if handle is not None:
                handles[card_id] = handle
        pairs = list(itertools.combinations(handles.items(), 2))
        if not pairs:
            return "", None
        if "NCCL_P2P_DISABLE" not in os.environ:
            for (first_id, first), (second_id, second) in pairs:
                _check_access(first_id, first, second_id, second)
        nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        statuses = [_peer_status(first, second, nvlink) for (_, first), (_, second) in pairs]
        handle = next(iter(handles.values()))
        if all(status == pynvml.NVML_P2P_STATUS_OK for status in statuses):
            return _nvlink_of(handle)
        return _pcie_of(handle)
    return "", None


def _check_access(first_id: str, first: Any, second_id: str, second: Any) -> None:
    """Raise `NoSuchCard` if two cards cannot access each other's memory."""
    access = _peer_status(first, second, pynvml.NVML_P2P_CAPS_INDEX_READ)
    by_nvlink = _peer_status(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if access is not None and pynvml.NVML_P2P_STATUS_OK not in (access, by_nvlink):
        raise NoSuchCard(
            f"The cards {first_id} and {second_id} cannot access each other's memory.",
            "Choose cards with peer access (`nvidia-smi topo -p2p r`), or set NCCL_P2P_DISABLE=1 "
            "to communicate through the host's memory.",
        )


def _nvlink_of(handle: Any) -> tuple[str, float | None]:
    """The NVLinks of a card ("NVLink x18"), and their bytes/s together."""
    number = _nvlinks(handle) or 0
    link_mb_per_s = optional(field_value, handle, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)
    if link_mb_per_s:
        link_bytes_per_s = link_mb_per_s * 1e6
    else:
        model = optional(pynvml.nvmlDeviceGetName, handle) or ""
        rates = (rate for name, rate in _NVLINK_BYTES_PER_S.items() if name in model)
        link_bytes_per_s = next(rates, 0.0)
    return f"NVLink x{number}", number * link_bytes_per_s or None


def _pcie_of(handle: Any) -> tuple[str, float | None]:
    """The PCI Express link of a card ("PCIe 5 x16"), and its bytes/s."""
    generation = optional(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0
    lanes = optional(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0
    return f"PCIe {generation} x{lanes}", _LANE_BYTES_PER_S.get(generation, 0) * lanes or None


def _peer_status(first: Any, second: Any, capability: Any) -> int | None:
    if isinstance(capability, tuple):  # a constant of pynvml is, by mistake
        capability = capability[0]
    return optional(pynvml.nvmlDeviceGetP2PStatus, first, second, capability)
