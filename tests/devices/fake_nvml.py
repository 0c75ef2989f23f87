"""Cards that exist only as an NVML library: it stands behind the real `pynvml`, in place of
libnvidia-ml.so.1.

Only the C functions are replaced, so everything that `pynvml` does with pointers, structures and
error codes is real."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml
import pytest

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_UUID = "GPU-99999999-8888-7777-6666-555555555555"

Function = Callable[..., int]


class FakeNvml:
    """Set the attributes; give `lacks` the C functions (and `lacking_fields` the field ids) that
    answer an error.

    One card unless `uuids` holds more; in `faults` are the functions that answer an error for the
    card of an index."""

    def __init__(self) -> None:
        self.uuids = [UUID]
        self.faults: dict[tuple[str, int], int] = {}
        self.name = b"NVIDIA H200"
        self.energy_mj = 123_456_789
        self.power_instant_mw = 345_678
        self.power_average_mw = 300_000
        self.sm_clock_mhz = 1980
        self.memory_clock_mhz = 3201
        self.temperature_c = 41
        self.memory_temperature_c = 55
        self.throttle_mask = 0
        self.processes: list[int] = []
        self.mig = 0
        self.nvlinks: list[int] = []  # 1: active, 0: not connected
        # whether each card can read the memory of the others; None: not reported
        self.access: bool | None = None
        self.ecc_errors: dict[int, int] = {}  # by kind
        self.nvlink_errors: dict[int, int] = {}  # of each link, by kind
        self.remapped_rows = (0, 0, 0, 0)  # corrected, uncorrected, pending, failed
        self.lacks: dict[str, int] = {}
        self.lacking_fields: dict[int, int] = {}
        self.missing: set[str] = set()  # not in the library at all, as with an old driver
        self.calls: list[str] = []
        self._functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        # pynvml sets `restype` on what it gets, so it must be one object per function.
        if name not in self._functions:

            def call(*arguments: Any) -> int | bytes:
                self.calls.append(name)
                if name in self.lacks:
                    return self.lacks[name]
                if fault := self._fault(name, arguments):
                    return fault
                answer = getattr(self, f"_{name}", None)
                if answer is None:
                    return pynvml.NVML_ERROR_NOT_SUPPORTED
                given = answer(*arguments)
                return pynvml.NVML_SUCCESS if given is None else given

            self._functions[name] = call
        return self._functions[name]

    def _fault(self, name: str, arguments: tuple[Any, ...]) -> int:
        if not any(name == function for function, _ in self.faults):
            return 0
        by_index = name == "nvmlDeviceGetHandleByIndex_v2"
        return self.faults.get((name, arguments[0].value if by_index else _index(arguments[0])), 0)

    def _nvmlInitWithFlags(self, flags: int) -> None: ...
    def _nvmlShutdown(self) -> None: ...

    def _nvmlErrorString(self, code: int) -> bytes:
        return b"error %d" % code

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> None:
        text.value = b"580.00"

    def _nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> None:
        version._obj.value = 13_000

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.uuids)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        _point(handle, index.value)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int | None:
        if uuid.value.decode() not in self.uuids:
            return pynvml.NVML_ERROR_NOT_FOUND
        _point(handle, self.uuids.index(uuid.value.decode()))
        return None

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> None:
        text.value = self.uuids[_index(handle)].encode()

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: int, active: Any) -> int | None:
        if link >= len(self.nvlinks):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        active._obj.value = self.nvlinks[link]
        return None

    def _nvmlDeviceGetNvLinkErrorCounter(
        self, handle: Any, link: int, kind: int, value: Any
    ) -> None:
        value._obj.value = self.nvlink_errors.get(kind, 0)

    def _nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, which: Any, value: Any) -> None:
        value._obj.value = self.ecc_errors.get(getattr(kind, "value", kind), 0)

    def _nvmlDeviceGetRemappedRows(self, handle: Any, *values: Any) -> None:
        for value, number in zip(values, self.remapped_rows, strict=True):
            value._obj.value = number

    def _nvmlDeviceGetPcieReplayCounter(self, handle: Any, value: Any) -> None:
        value._obj.value = 0

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> None:
        info._obj.busId = b"00000000:3B:00.0"

    def _nvmlDeviceGetP2PStatus(
        self, handle: Any, other: Any, what: int, status: Any
    ) -> int | None:
        assert what in (0, pynvml.NVML_P2P_CAPS_INDEX_NVLINK), "reading, or by NVLink"
        if self.access is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        status._obj.value = (
            pynvml.NVML_P2P_STATUS_OK
            if self.access
            else pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
        )
        return None

    def _nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> None:
        text.value = self.name

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        memory._obj.total = 143_771 * 2**20

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:
        current._obj.value = pending._obj.value = self.mig

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, value: Any) -> None:
        value._obj.value = self.energy_mj

    def _nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> None:
        value._obj.value = self.power_average_mw

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, value: Any) -> None:
        value._obj.value = 700_000

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> None:
        known = {
            pynvml.NVML_FI_DEV_POWER_INSTANT: self.power_instant_mw,
            pynvml.NVML_FI_DEV_MEMORY_TEMP: self.memory_temperature_c,
            pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: 26_562,
        }
        for field in values._obj:
            field.nvmlReturn = self.lacking_fields.get(field.fieldId, pynvml.NVML_SUCCESS)
            field.value.uiVal = known[field.fieldId]

    def _nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, value: Any) -> None:
        memory = getattr(kind, "value", kind) == pynvml.NVML_CLOCK_MEM
        value._obj.value = self.memory_clock_mhz if memory else self.sm_clock_mhz

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, value: Any) -> None:
        value._obj.value = self.temperature_c

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, value: Any) -> None:
        value._obj.value = self.throttle_mask

    _nvmlDeviceGetCurrentClocksThrottleReasons = _nvmlDeviceGetCurrentClocksEventReasons

    def _nvmlDeviceGetComputeRunningProcesses_v3(
        self, handle: Any, count: Any, entries: Any
    ) -> int | None:
        if entries is None:
            count._obj.value = len(self.processes)
            return pynvml.NVML_ERROR_INSUFFICIENT_SIZE if self.processes else None
        count._obj.value = len(self.processes)
        for entry, pid in zip(entries, self.processes, strict=False):
            entry.pid = pid
        return None


def _point(handle: Any, index: int) -> None:
    """Make a handle one of the card of that index: never a null pointer."""
    ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index + 1


def _index(handle: Any) -> int:
    return (ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


@contextmanager
def behind_pynvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    library = FakeNvml()
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", library)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        yield library
