"""The lifetime of every tensor of a step: when it exists, when it is used, and when it is inactive.

The caller gives the time of each call. A tensor is *active* while a call reads or writes it. It is
*inactive* while it exists and no call uses it. If it exists before and after the step, it is also
inactive from its last use to its first use in the next step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from farm.operators.captured import ROLES, CapturedPass, CapturedTensor
from farm.types.tuple import names_listed

ALLOCATED_BYTES = 512  # PyTorch's allocator rounds sizes up to a multiple of this on a card


@dataclass(frozen=True)
class Inactive:
    """A period in which a tensor waits for its next use."""

    tensor: int
    # the index of the first call that does not use the tensor; the number of calls if the last call
    # uses it
    begin: int
    # the index of the next call that uses it; if this call is in the next step, at most ``begin``
    end: int
    begin_us: float
    time_us: float
    over_the_end: bool

    @property
    def end_us(self) -> float:
        """The end of the period in µs since the start of the step in which it began."""
        return self.begin_us + self.time_us


@dataclass(frozen=True)
class PeriodInterval:
    """The inactive periods in a range of lengths or sizes, from ``least`` to below the next
    ``least``.
    """

    least: float
    periods: int
    size_bytes: int
    byte_s: float


@dataclass(frozen=True)
class Life:
    """The timeline of a captured step: when its calls run and its tensors exist. Unit: µs."""

    capture: CapturedPass
    times_us: tuple[float, ...]

    @functools.cached_property
    def begins_us(self) -> tuple[float, ...]:
        """The begin of each call and the end of the step in µs, if calls run one after another."""
        return tuple(itertools.accumulate(self.times_us, initial=0.0))

    @property
    def step_us(self) -> float:
        return self.begins_us[-1]

    @functools.cached_property
    def tensors(self) -> tuple[CapturedTensor, ...]:
        """The tensors that exist during at least one call; without the gradients of the previous
        step.
        """
        return tuple(
            tensor
            for tensor in self.capture.tensors
            if self.capture.last_held(tensor) >= max(tensor.born, 0)
        )

    @functools.cached_property
    def sizes_bytes(self) -> Mapping[int, int]:
        """Tensor number -> size in bytes."""
        return {tensor.number: tensor.size_bytes for tensor in self.tensors}

    @functools.cached_property
    def periods(self) -> Mapping[int, tuple[Inactive, ...]]:
        """Tensor number -> inactive periods."""
        return {tensor.number: tuple(self._periods(tensor)) for tensor in self.tensors}

    def _periods(self, tensor: CapturedTensor) -> Iterable[Inactive]:
        begins = self.begins_us
        for before, end in itertools.pairwise(tensor.uses):
            begin = before + 1
            if begin < end:
                time_us = begins[end] - begins[begin]
                yield Inactive(tensor.number, begin, end, begins[begin], time_us, False)
        if tensor.outlives:
            first, behind = (tensor.uses[0], tensor.uses[-1] + 1) if tensor.uses else (0, 0)
            if not tensor.uses or behind < len(self.times_us) or first > 0:
                time_us = self.step_us - begins[behind] + begins[first]
                yield Inactive(tensor.number, behind, first, begins[behind], time_us, True)

    @functools.cached_property
    def inactive_byte_s(self) -> Mapping[int, float]:
        """Tensor number -> size times inactive time, in byte seconds."""
        return {
            number: size_bytes * sum(period.time_us for period in self.periods[number]) / 1e6
            for number, size_bytes in self.sizes_bytes.items()
        }

    @functools.cached_property
    def held_by_role(self) -> Mapping[str, tuple[int, ...]]:
        """Role -> for each call, bytes of the tensors that exist during it."""
        groups = {
            role: [tensor for tensor in self.tensors if tensor.role == role] for role in ROLES
        }
        return {role: self.capture.held_bytes(group) for role, group in groups.items() if group}

    @functools.cached_property
    def active_by_role(self) -> Mapping[str, tuple[int, ...]]:
        """Role -> for each call, bytes of the tensors that it reads or writes."""
        rows = {role: [0] * len(self.times_us) for role in self.held_by_role}
        for tensor in self.tensors:
            for index in tensor.uses:
                rows[tensor.role][index] += tensor.size_bytes
        return {role: tuple(row) for role, row in rows.items()}

    @functools.cached_property
    def held_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.held_by_role.values(), strict=True)))

    @functools.cached_property
    def active_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.active_by_role.values(), strict=True)))

    @functools.cached_property
    def peak(self) -> int:
        """The index of the first call at which memory reaches its peak."""
        return max(range(len(self.held_bytes)), key=lambda index: self.held_bytes[index])

    @property
    def base_bytes(self) -> int:
        """Bytes of the tensors that exist before and after the step."""
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.outlives)

    def at_peak(self) -> list[CapturedTensor]:
        """The tensors that exist at the peak, the largest first."""
        at_peak = [
            tensor
            for tensor in self.tensors
            if max(tensor.born, 0) <= self.peak <= self.capture.last_held(tensor)
        ]
        return sorted(at_peak, key=lambda tensor: -tensor.size_bytes)

    def by_length(self, bounds_us: tuple[float, ...]) -> list[PeriodInterval]:
        """Inactive periods counted per interval of their length. ``bounds_us``, ascending, separate
        the intervals.
        """
        return self._intervals(bounds_us, lambda size_bytes, time_us: time_us)

    def by_size(self, bounds_bytes: tuple[float, ...]) -> list[PeriodInterval]:
        """Inactive periods counted per interval of tensor size. ``bounds_bytes``, ascending,
        separate the intervals.
        """
        return self._intervals(bounds_bytes, lambda size_bytes, time_us: size_bytes)

    def _intervals(
        self, bounds: tuple[float, ...], value: Callable[[int, float], float]
    ) -> list[PeriodInterval]:
        periods = []
        for number, of_tensor in self.periods.items():
            size_bytes = self.sizes_bytes[number]
            periods += [(size_bytes, period.time_us) for period in of_tensor]
        rows = []
        for least, below in itertools.pairwise((0.0, *bounds, float("inf"))):
            inside = [period for period in periods if least <= value(*period) < below]
            total_bytes = sum(size_bytes for size_bytes, _ in inside)
            byte_s = sum(size_bytes * time_us / 1e6 for size_bytes, time_us in inside)
            rows.append(PeriodInterval(least, len(inside), total_bytes, byte_s))
        return rows


def allocated_peak_bytes(capture: CapturedPass) -> int:
    """The peak memory in bytes, with sizes rounded up as by PyTorch's allocator on a card."""
    return max(capture.held_bytes(capture.tensors, rounded_to=ALLOCATED_BYTES))


#: On a CPU these make larger tensors than on a card: masks of numbers instead of bits, attention
#: with all its scores.
_SMALLER_ON_A_CARD = names_listed("smaller_on_a_card")


def least_peak_bytes(capture: CapturedPass) -> int:
    """A lower bound of a card's peak memory in bytes, from a capture without the card. It leaves
    out the tensors that calls of `_SMALLER_ON_A_CARD` create."""
    tensors = []
    for tensor in capture.tensors:
        owner = capture.calls[tensor.born].owner if tensor.born >= 0 else ""
        if owner not in _SMALLER_ON_A_CARD:
            tensors.append(tensor)
    return max(capture.held_bytes(tensors))
