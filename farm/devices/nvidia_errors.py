"""The error counters of NVIDIA cards: ECC, remapped rows, PCI Express and NVLink through NVML, and
Xid errors in the kernel's log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from farm.devices.nvidia_links import active_nvlinks
from farm.devices.nvml import opened
from farm.types.error_counters import ErrorCounters

#: The log of the kernel: its newest messages since the host started. Reading it needs a right that
#: containers and many users lack.
KERNEL_LOG = "/dev/kmsg"
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)")
_RECORD_BYTES = 8192

_CORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED


def _ecc(handle: Any, kind: int) -> int:
    """Errors of all memories over the life of the card."""
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_AGGREGATE_ECC))


def _remapped(handle: Any, index: int) -> int:
    return int(pynvml.nvmlDeviceGetRemappedRows(handle)[index])


def _nvlink(handle: Any, *kinds: int) -> int:
    """Errors of these kinds on all active links."""
    number = 0
    for link in active_nvlinks(handle):
        for kind in kinds:
            number += int(pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind))
    return number


def _xid_errors(handle: Any) -> int:
    """The Xid errors of a card in the kernel's log. Raises OSError if it cannot be read."""
    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    name = bus.decode() if isinstance(bus, bytes) else bus
    # NVML writes "00000000:3B:00.0", the kernel "0000:3b:00"
    place = name.lower().rpartition(".")[0][-10:]
    return sum(logged == place for logged in _logged_xids())


def _logged_xids() -> Iterator[str]:
    """Yield the place of the card of each Xid error, such as "0000:3b:00"."""
    log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(log, _RECORD_BYTES)
            except BlockingIOError:  # no further message
                return
            except BrokenPipeError:  # the kernel has overwritten the message
                continue
            if not record:
                return
            match = _XID.search(record.decode(errors="replace"))
            if match:
                yield match.group(1).lower()
    finally:
        os.close(log)


_COUNTERS: dict[str, Callable[[Any], int]] = {
    "ecc_corrected": lambda handle: _ecc(handle, _CORRECTED),
    "ecc_uncorrected": lambda handle: _ecc(handle, _UNCORRECTED),
    "remapped_rows_corrected": lambda handle: _remapped(handle, 0),
    "remapped_rows_uncorrected": lambda handle: _remapped(handle, 1),
    "remapping_pending": lambda handle: _remapped(handle, 2),
    "remapping_failed": lambda handle: _remapped(handle, 3),
    "pcie_replays": lambda handle: int(pynvml.nvmlDeviceGetPcieReplayCounter(handle)),
    "nvlink_replays": lambda handle: _nvlink(handle, pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
    "nvlink_recoveries": lambda handle: _nvlink(handle, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    "nvlink_crc_errors": lambda handle: _nvlink(
        handle, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA
    ),
    "xid_errors": _xid_errors,
}


def error_counters(card_id: str) -> ErrorCounters | None:
    """See `farm.devices.host.error_counters`."""
    counts: dict[str, int] = {}
    not_read: dict[str, str] = {}
    try:
        with opened():
            handle = pynvml.nvmlDeviceGetHandleByUUID(card_id)
            for name, query in _COUNTERS.items():
                try:
                    counts[name] = query(handle)
                except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, OSError) as error:
                    not_read[name] = _reason(error)
    except pynvml.NVMLError as error:
        return ErrorCounters(not_read=dict.fromkeys(_COUNTERS, _reason(error)))
    return ErrorCounters(counts, not_read)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or KERNEL_LOG}: {error.strerror or error}"
    return str(error)
