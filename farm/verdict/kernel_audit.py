"""The kernels that a whole model launches, compared with those of its tuples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from farm.types.verification import Verification
from farm.verdict.cost_line import CostLine

KEPT = 30  # largest length of each list of kernels


@dataclass(frozen=True)
class AuditedKernel:
    """One kernel: its launches in the whole and in all tuples together, and its time in the
    whole.
    """

    name: str
    whole: int
    tuples: int
    time_us: float = 0.0


@dataclass(frozen=True)
class KernelAudit:
    """The kernels of the whole compared with those of its tuples. `explained` is the share of the
    whole's kernel time in launches that the tuples make too. Each list holds at most the 30
    heaviest kernels; the counts include all."""

    explained: float
    time_us: float  # time of all kernels of one unobserved pass
    launches: int
    unknown_tuples: int  # tuples of the model without known kernels
    only_whole: tuple[AuditedKernel, ...] = ()
    only_tuples: tuple[AuditedKernel, ...] = ()
    other_counts: tuple[AuditedKernel, ...] = ()
    only_whole_count: int = 0
    only_tuples_count: int = 0
    other_counts_count: int = 0
    launch: str = "eager"  # launch of the observed pass

    @property
    def same(self) -> bool:
        """True if whole and tuples launch the same kernels equally often."""
        return not (self.only_whole_count or self.only_tuples_count or self.other_counts_count)


def audit_kernels(verification: Verification, parts: Iterable[CostLine]) -> KernelAudit | None:
    """Compare the kernels of a whole (from the verification on a card) with those of its parts.
    None if the kernels of the whole or those of all parts are unknown."""
    in_whole = verification.kernels or {}
    total_us = sum(launches.time_us for launches in in_whole.values())
    in_tuples, examined, unknown = _launches_of_tuples(verification.tuple_kernels or {}, parts)
    if not total_us or not examined:
        return None

    of_whole = [
        AuditedKernel(name, launches.count, in_tuples[name], launches.time_us)
        for name, launches in in_whole.items()
    ]
    of_whole.sort(key=lambda kernel: -kernel.time_us)
    only_whole = [kernel for kernel in of_whole if not kernel.tuples]
    other_counts = [
        kernel for kernel in of_whole if kernel.tuples and kernel.tuples != kernel.whole
    ]
    only_tuples = [
        AuditedKernel(name, 0, launches)
        for name, launches in in_tuples.most_common()
        if name not in in_whole
    ]
    return KernelAudit(
        explained=_explained_us(of_whole) / total_us,
        time_us=total_us,
        launches=sum(kernel.whole for kernel in of_whole),
        unknown_tuples=unknown,
        only_whole=tuple(only_whole[:KEPT]),
        only_tuples=tuple(only_tuples[:KEPT]),
        other_counts=tuple(other_counts[:KEPT]),
        only_whole_count=len(only_whole),
        only_tuples_count=len(only_tuples),
        other_counts_count=len(other_counts),
        launch=verification.launch or "eager",
    )


def _launches_of_tuples(
    kernels_of: Mapping[str, Mapping[str, int]], parts: Iterable[CostLine]
) -> tuple[Counter[str], int, int]:
    """Return kernel -> its launches in all calls of the parts, and the numbers of parts with and
    without known kernels. `kernels_of`: tuple id -> the launches of one call.
    """
    launches = Counter[str]()
    examined = unknown = 0
    for part in parts:
        kernels = kernels_of.get(part.subject.operator_id)
        if kernels is None:
            unknown += 1
            continue
        examined += 1
        for name, times in kernels.items():
            launches[name] += times * part.count
    return launches, examined, unknown


def _explained_us(kernels: Iterable[AuditedKernel]) -> float:
    """Return the time of the launches that the tuples make too."""
    return sum(
        kernel.time_us * min(1.0, kernel.tuples / kernel.whole)
        for kernel in kernels
        if kernel.whole
    )
