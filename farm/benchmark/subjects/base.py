"""The interface of a kind of measured subjects: how its passes are built, and its windows.

`farm.benchmark.subjects.kind_of_subject` is the only place that decides by the kind. Example::

    class Silence(SubjectKind):
        def passes(self, subject, protocol, device, offload=None):
            return Passes(lambda: time.sleep(0.001))

        def policy(self, protocol, *, rough=False):
            return POLICIES["operator"]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from farm.benchmark.passes import Offload, Passes
from farm.benchmark.policies import WindowPolicy
from farm.types.protocol import Protocol, Stopping, Subject


class SubjectKind(ABC):
    """What differs between kinds of subjects while they are measured."""

    #: The names of the phases that a subject of this kind can need after its window
    #: (`farm.benchmark.phases`).
    phases: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def passes(
        self,
        subject: Subject,
        protocol: Protocol,
        device: torch.device,
        offload: Offload | None = None,
    ) -> Passes:
        """Build the passes of a subject with the data of the protocol, under `passes.applied`.

        Raises:
            Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
            TupleRejected: the JSON of the subject is not a tuple.
        """

    @abstractmethod
    def policy(self, protocol: Protocol, *, rough: bool = False) -> WindowPolicy:
        """The policy of the windows. `rough`: a rough figure is enough (`Stopping.rough`)."""

    def stopping(self, stopping: Stopping, ranks: int) -> Stopping:
        """The stopping rule of a window on so many ranks."""
        return stopping

    def has_canary(self, stopping: Stopping) -> bool:
        """True if readings under this rule have a canary (`farm.benchmark.checks.Canary`)."""
        return False
