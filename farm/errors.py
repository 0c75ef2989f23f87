"""Every error a person can meet, in one tree, each with the step that mends it.

    FarmError
    ├── UsageError                 the request itself is wrong             exit 2
    │   ├── UnknownModel           no such model in the catalog
    │   ├── UnsupportedModel       known, but refused with a reason
    │   ├── UnknownOperator        no such operator in the allow-list
    │   ├── MeasurementFileError   malformed YAML: file, line, key
    │   ├── NoSuchJob
    │   ├── NoSuchCard
    │   ├── Ambiguous              it means several, and one must be chosen
    │   └── SettingsError          a setting or its file is malformed
    ├── CaptureError               the model could not be extracted        exit 1
    ├── Refused                    so one of several, or it does not fit   exit 1
    ├── TupleRejected              a tuple that is not one: never built    exit 1
    ├── Unreadable                 a stored row that no longer parses      exit 1
    ├── Unmeasurable               an item that ends as a row with reason  (not an exit)
    ├── FarmUnavailable            a part of the farm does not answer      exit 3
    │   ├── BrokerUnreachable
    │   ├── DatabaseUnreachable
    │   ├── SchemaMismatch         the database is of another version
    │   │   └── NoDatabase         there is none yet, or an empty one
    │   ├── NoWorker               nobody listens on a chosen card
    │   └── CardUnavailable        a worker's card does not answer now, and may later
    ├── UnhealthyCard              a card that fails a known sum           exit 1
    ├── CardBusy                   another worker holds the card's lock    exit 4
    ├── BelowTarget                ``--check`` and the verdict failed      exit 5
    └── Unwritable                 stdout takes nothing more               exit 1

``message`` says what was wrong and with which input, ``next_step`` what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FarmError(Exception):
    """Base of all errors that are for people: shown as one message, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (type(self), (self.message, self.next_step))


class UsageError(FarmError):
    exit_code = 2


class UnknownModel(UsageError):
    """No model of that name; names the nearest ones."""

    @classmethod
    def named(cls, name: str, known: Iterable[str]) -> UnknownModel:
        return cls(
            f"There is no model named '{name}'.",
            did_you_mean(name, known) or "List the models with `farm models`.",
        )


class UnsupportedModel(UsageError):
    pass


class UnknownOperator(UsageError):
    """No operator of that name; names the nearest ones."""

    @classmethod
    def named(cls, name: str, *known: Iterable[str]) -> UnknownOperator:
        """
        Args:
            known: the names to choose from, the likeliest group first; from the first with a near one it is suggested.
        """
        near = next(filter(None, (did_you_mean(name, group) for group in known)), "")
        return cls(
            f"There is no operator named '{name}'.", near or "List a model's operators with `farm operators MODEL`."
        )


class MeasurementFileError(UsageError):
    """A malformed measurement file; ``message`` starts with ``file:line: key``."""


class NoSuchJob(UsageError):
    pass


class NoSuchCard(UsageError):
    pass


class Ambiguous(UsageError):
    """Several are meant where one must be; ``next_step`` names them. There is no use in asking elsewhere."""


class SettingsError(UsageError):
    pass


class CaptureError(FarmError):
    pass


class Refused(FarmError):
    """Of several things to measure some cannot be; the others were."""


class TupleRejected(FarmError):
    """The JSON is not an operator tuple, or names an operator outside the allow-list."""


class Unreadable(FarmError):
    """What a row of the database holds is not what the farm writes there: somebody changed it, or its disk did."""


class Unmeasurable(FarmError):
    """One item could not be measured. ``reason`` is a word of `REASONS`, kept in the row.

    Raised in the benchmark process and below; the task turns it into the item's terminal row.
    """

    REASONS = (
        "out_of_memory",  # the subject does not fit on the card
        "raised",  # PyTorch raised on the card
        "crashed",  # the benchmark process died (signal or exit)
        "hung",  # no answer within the time limit
        "rejected",  # the tuple failed validation on the worker
        "not_capturable",  # no CUDA graph can be made of it
        "not_available",  # what the protocol asks for is not to be had on this card
        "attempts_exhausted",  # every delivery ended without an answer
        "card_left",  # the very card that it was to be read on was away when its job waited for nothing else
    )

    def __init__(self, reason: str, message: str, next_step: str = "") -> None:
        if reason not in self.REASONS:
            raise ValueError(f"{reason!r} is none of the reasons {self.REASONS}")
        super().__init__(message, next_step)
        self.reason = reason

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (type(self), (self.reason, self.message, self.next_step))


class FarmUnavailable(FarmError):
    exit_code = 3


class BrokerUnreachable(FarmUnavailable):
    pass


class DatabaseUnreachable(FarmUnavailable):
    pass


class SchemaMismatch(FarmUnavailable):
    pass


class NoDatabase(SchemaMismatch):
    """There is none yet, or one without tables: nothing is known, and nothing is in the way."""


class NoWorker(FarmUnavailable):
    pass


class CardUnavailable(FarmUnavailable):
    pass


class UnhealthyCard(FarmError):
    """A known operator gave a wrong result or took an implausible time: the card is quarantined."""


class CardBusy(FarmError):
    exit_code = 4


class BelowTarget(FarmError):
    exit_code = 5


class Unwritable(FarmError):
    """What was asked for is there, and cannot be printed."""

    @classmethod
    def because(cls, error: OSError) -> Unwritable:
        return cls(f"The output cannot be written: {error.strerror or error}.", "Make room, or write it elsewhere.")


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """'Did you mean resnet50 or resnet34?', or '' when nothing is near."""
    lowered = {candidate.lower(): candidate for candidate in known}
    near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.6)]
    return f"Did you mean {' or '.join(near)}?" if near else ""
