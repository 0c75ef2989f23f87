"""One level below the tuples: are the kernels of the whole model the kernels of its tuples?

A sum can agree with a whole by chance. If the tuples launch the same kernels as often as the model does, it agrees
for a reason; where they do not, the names say where to look: another algorithm was chosen for the same convolution,
a copy was made that the model does not make. The whole's kernels come from an unobserved pass on the card, those of a
tuple from one pass of its own, rebuilt, in the same process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from farm.types.reading import Verification
from farm.verdict.figures import Part

KEPT = 30


@dataclass(frozen=True)
class Kernel:
    """One kernel by name: how often the whole launched it and the tuples together did, and its time in the whole."""

    name: str
    whole: int
    tuples: int
    time_us: float = 0.0


@dataclass(frozen=True)
class KernelAudit:
    """The whole's kernels against those of its tuples.

    `explained` is the share of the whole's kernel time that the tuples' launches of the same kernels account for.
    The lists hold the heaviest, at most 30 each; the numbers count all.
    """

    explained: float
    time_us: float  # of all kernels of one unobserved pass
    launches: int
    unknown_tuples: int  # of the model's tuples, those whose kernels nobody has seen
    only_whole: tuple[Kernel, ...] = ()
    only_tuples: tuple[Kernel, ...] = ()
    other_counts: tuple[Kernel, ...] = ()
    only_whole_count: int = 0
    only_tuples_count: int = 0
    other_counts_count: int = 0
    launch: str = "eager"  # of the pass that was looked at

    @property
    def same(self) -> bool:
        """Whether whole and tuples launch the same kernels equally often."""
        return not (self.only_whole_count or self.only_tuples_count or self.other_counts_count)


def audit_kernels(seen: Verification, parts: Iterable[Part]) -> KernelAudit | None:
    """Hold the kernels of a whole against those of its parts.

    Args:
        seen: what verifying the whole on a card found: its `kernels` and `tuple_kernels`.

    None where the whole's kernels are not known, or those of no part (a CPU).
    """
    whole, of_tuples = seen.kernels or {}, seen.tuple_kernels or {}
    expected: Counter[str] = Counter()
    unknown = known = 0
    for part in parts:
        kernels = of_tuples.get(part.operator_id)
        if kernels is None:
            unknown += 1
            continue
        known += 1
        for name, times in kernels.items():
            expected[name] += times * part.count
    everything_us = sum(launches.time_us for launches in whole.values())
    if not everything_us or not known:
        return None
    both = [Kernel(name, launches.count, expected[name], launches.time_us) for name, launches in whole.items()]
    both.sort(key=lambda kernel: -kernel.time_us)
    only_whole = [kernel for kernel in both if not kernel.tuples]
    other_counts = [kernel for kernel in both if kernel.tuples and kernel.tuples != kernel.whole]
    only_tuples = [Kernel(name, 0, launches) for name, launches in expected.most_common() if name not in whole]
    explained_us = sum(kernel.time_us * min(1.0, kernel.tuples / kernel.whole) for kernel in both if kernel.whole)
    return KernelAudit(
        explained=explained_us / everything_us,
        time_us=everything_us,
        launches=sum(kernel.whole for kernel in both),
        unknown_tuples=unknown,
        only_whole=tuple(only_whole[:KEPT]),
        only_tuples=tuple(only_tuples[:KEPT]),
        other_counts=tuple(other_counts[:KEPT]),
        only_whole_count=len(only_whole),
        only_tuples_count=len(only_tuples),
        other_counts_count=len(other_counts),
        launch=seen.launch or "eager",
    )
