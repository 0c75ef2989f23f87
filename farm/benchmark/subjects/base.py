"""The interface of a kind of measured subjects: its passes, its windows and its phases.

`farm.benchmark.subjects.kind_of_subject` is the only place that decides by the kind. Example::

    class Silence(SubjectKind):
        def passes(self, subject, protocol, device):
            return Passes(lambda: time.sleep(0.001))

        def policy(self, protocol, stopping):
            return POLICIES["operator"]

        def phases(self, subject):
            return [Bursts()]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from farm.benchmark.passes import Passes
from farm.benchmark.phases.base import Phase
from farm.benchmark.policies import WindowPolicy
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject


class SubjectKind(ABC):
    """What differs between kinds of subjects while they are measured."""

    #: Calls of modules may be replaced while a CPU times a pass
    #: (`farm.benchmark.host_clock.HostTimer`).
    marks_modules: ClassVar = True

    @abstractmethod
    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        """Build the passes of a subject with the data of the protocol, under `passes.applied`.

        Raises:
            Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
            TupleRejected: the JSON of the subject is not a tuple.
        """

    @abstractmethod
    def policy(self, protocol: Protocol, stopping: Stopping) -> WindowPolicy:
        """The policy of the windows."""

    def phases(self, subject: Subject) -> Sequence[Phase]:
        """The phases that a subject can need after its window, in order
        (`farm.benchmark.phases.base`)."""
        return ()

    def stopping(self, stopping: Stopping, ranks: int) -> Stopping:
        """The stopping rule of a window on so many ranks."""
        return stopping

    def has_canary(self, stopping: Stopping) -> bool:
        """True if readings under this rule have a canary (`farm.benchmark.checks.Canary`)."""
        return False
