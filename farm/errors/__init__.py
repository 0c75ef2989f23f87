"""All errors that are shown to users, in one tree. Each error says what to do next.

    FarmError
    ├── UsageError                 the request itself is wrong             exit 2
    │   ├── UnknownModel           no such model in the catalog
    │   ├── UnsupportedModel       known, but refused with a reason
    │   ├── UnknownOperator        no such operator in the allow-list
    │   ├── MeasurementFileError   malformed YAML, with file, line and key
    │   ├── NoSuchJob
    │   ├── NoSuchCard
    │   ├── Ambiguous              a name matches several; choose one
    │   └── SettingsError          a setting or its file is malformed
    ├── CaptureError               the model could not be extracted        exit 1
    │   ├── UnseenOperators        a part runs where no capture sees it
    │   └── UnsupportedTensor      it computes with a special tensor
    ├── Refused                    one of several cannot be measured       exit 1
    ├── TupleRejected              the JSON is not an operator tuple       exit 1
    ├── Unreadable                 a stored row is damaged                 exit 1
    ├── DamagedPackage             a file of the installation is damaged   exit 1
    ├── Unmeasurable               an item ends with a reason in its row   (not an exit)
    │   └── HostBusy               not now: the item waits again            (not an exit)
    ├── FarmUnavailable            a part of the farm does not answer      exit 3
    │   ├── BrokerUnreachable
    │   ├── DatabaseUnreachable
    │   ├── SchemaMismatch         the database is of another version
    │   │   └── NoDatabase         the database does not exist or is empty
    │   ├── NoWorker               no worker serves a chosen card
    │   └── CardUnavailable        a card does not answer now, but may later
    ├── UnhealthyCard              a card fails its health check           exit 1
    ├── CardBusy                   others hold the card's lock or use it   exit 4
    ├── BelowTarget                ``--check`` and the verdict failed      exit 5
    └── Unwritable                 stdout cannot be written                exit 1

``message`` says what was wrong, and with which input. ``next_step`` says what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import sys
import traceback
from collections.abc import Iterable, Iterator

from farm.errors.safe_text import without_secrets

MOST_CHARACTERS = 2000  # of the text of another program's exception


class FarmError(Exception):
    """Base of all errors that are shown to users, as one message without a traceback."""

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        self.message = without_secrets(message)
        super().__init__(self.message)
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}\n→ {self.next_step}" if self.next_step else self.message

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (type(self), (self.message, self.next_step))


class UsageError(FarmError):
    exit_code = 2


class UnknownModel(UsageError):
    """No model has this name. ``next_step`` suggests similar names."""

    @classmethod
    def named(cls, name: str, known: Iterable[str], like: str = "") -> UnknownModel:
        """``like``: the text that suggested names are similar to, if this is not ``name``."""
        step = did_you_mean(like or name, known) or "List the models with `farm models`."
        return cls(f"There is no model named '{name}'.", step)


class UnsupportedModel(UsageError):
    """The catalog knows the model but refuses it, with a reason."""


class UnknownOperator(UsageError):
    """No operator has this name. ``next_step`` suggests similar names."""

    @classmethod
    def named(cls, name: str, *known: Iterable[str]) -> UnknownOperator:
        """Suggest similar names from the first group of `known` that has any. Pass the likeliest
        group first.
        """
        near = next(filter(None, (did_you_mean(name, group) for group in known)), "")
        return cls(
            f"There is no operator named '{name}'.",
            near or "List a model's operators with `farm operators MODEL`.",
        )


class MeasurementFileError(UsageError):
    """A malformed measurement file; ``message`` starts with ``file:line: key``."""


class NoSuchJob(UsageError):
    """No job has this id, or an id that begins like this."""


class NoSuchCard(UsageError):
    """No card matches, or no measurement can run on the matching cards."""


class Ambiguous(UsageError):
    """A name matches several models, cards or jobs, but one is needed. ``next_step`` lists them."""


class NoReadings(UsageError):
    """The database has no reading for the question. ``next_step`` says how to measure."""


class SettingsError(UsageError):
    """A setting or the settings file is malformed."""


class CaptureError(FarmError):
    """The operator calls of a model could not be captured."""


class UnseenOperators(CaptureError):
    """A part of the model runs where no capture sees it, such as in another thread."""


class UnsupportedTensor(CaptureError):
    """The model computes with a tensor that is more than dtype and strides: sparse, nested,
    quantised, ...
    """


class Refused(FarmError):
    """Some of the requested things cannot be measured. The others were measured."""


class TupleRejected(FarmError):
    """The JSON is not an operator tuple, or names an operator outside the allow-list."""


class Unreadable(FarmError):
    """A database row has a value that the farm never writes: another program or a disk error
    changed the row.
    """


class DamagedPackage(FarmError):
    """A data file of the installed package is damaged or missing."""

    @classmethod
    def of(cls, path: object, problem: str) -> DamagedPackage:
        """``problem``: the end of a sentence, such as "cannot be read"."""
        return cls(
            f"The file '{path}' of the installed package {problem}.",
            "Install the package again: `pip install --force-reinstall --no-deps operator-farm`, "
            "or `git checkout` the "
            "file in a clone.",
        )


class Unmeasurable(FarmError):
    """One item could not be measured. ``reason`` is one of `REASONS` and is stored with the item.

    The benchmark process raises it. The worker's task then closes the item with this reason.
    """

    REASONS = (
        "out_of_memory",  # the operator or model does not fit in the card's memory
        "raised",  # PyTorch raised an error on the card
        "crashed",  # the benchmark process died (signal or exit)
        "hung",  # no answer within the time limit
        "rejected",  # the worker did not accept the tuple
        "not_capturable",  # it cannot be recorded as a CUDA graph
        "not_available",  # the card does not support the protocol
        "not_positive",  # the measured time is zero or negative
        "attempts_exhausted",  # every attempt ended without a result
        "card_left",  # its card was gone, and the job had no other open items
    )

    def __init__(self, reason: str, message: str, next_step: str = "") -> None:
        if reason not in self.REASONS:
            raise ValueError(f"{reason!r} is none of the reasons {self.REASONS}")
        super().__init__(message, next_step)
        self.reason = reason

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (type(self), (self.reason, self.message, self.next_step))


class HostBusy(Unmeasurable):
    """This host lacks something now that is no fault of the item: another process holds the lock of
    what its cards share, or a folder cannot be used. The worker's task puts the item off, and the
    attempt does not count."""


class FarmUnavailable(FarmError):
    exit_code = 3


class BrokerUnreachable(FarmUnavailable):
    """The broker does not answer."""


class DatabaseUnreachable(FarmUnavailable):
    """The database does not answer, is read-only, refuses its user, or its file is damaged."""


class SchemaMismatch(FarmUnavailable):
    """The database has a different schema than this program, or belongs to another program."""


class NoDatabase(SchemaMismatch):
    """The database does not exist yet, or has no tables."""


class NoWorker(FarmUnavailable):
    """No worker serves a chosen card."""


class CardUnavailable(FarmUnavailable):
    """The card of a worker does not answer now, but may answer later."""


class UnhealthyCard(FarmError):
    """A known operator had a wrong result or an implausible time on the card, so the card is
    quarantined.
    """


class CardBusy(FarmError):
    exit_code = 4


class BelowTarget(FarmError):
    exit_code = 5


class CardNotMeasured(FarmError):
    """Fewer than half of the figures of a card check could be measured."""


class Unwritable(FarmError):
    """The output cannot be written to stdout."""

    @classmethod
    def because(cls, error: OSError) -> Unwritable:
        if error.errno == errno.EBADF:
            return cls(
                "The output cannot be written: stdout is closed.",
                "Leave it open, or write to /dev/null.",
            )
        return cls(
            f"The output cannot be written: {error.strerror or error}.",
            "Free disk space, or write the output to another place.",
        )


@contextlib.contextmanager
def needing(what: str, extra: str, also: str = "") -> Iterator[None]:
    """A context for the import of an optional package. Raises `UsageError` if it is not installed.

    Args:
        what: such as "Drawing needs matplotlib".
        extra: the extra of the farm that contains the package.
        also: the end of the next step.
    """
    try:
        yield
    except ImportError as error:
        step = f"Install it with `pip install 'operator-farm[{extra}]'`{also}."
        raise UsageError(f"{what}, which is not installed.", step) from error


@contextlib.contextmanager
def writing_to(path: object, next_step: str = "Name another file.") -> Iterator[None]:
    """A context for writing a file or folder. Raises `UsageError` if that fails, with the next
    step; for a full disk this is to free space.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            next_step = "Free disk space, or write to another disk."
        raise UsageError(
            f"'{path}' cannot be written: {error.strerror or error}.", next_step
        ) from error


@contextlib.contextmanager
def reading_package(path: object) -> Iterator[None]:
    """A context for reading and decoding a data file of the package. Raises `DamagedPackage` if
    that fails.
    """
    try:
        yield
    except Exception as error:
        raise DamagedPackage.of(path, "cannot be read") from error


def error_text(error: BaseException) -> str:
    """The text of an exception. User code raises exceptions whose own text raises: they get a fixed
    text.
    """
    try:
        return str(error)
    except (Exception, SystemExit):
        return "(its text cannot be shown)"


def told(error: BaseException) -> str:
    """Return `ValueError: no width (/home/a/net.py, line 5: ...)`, with the innermost line of the
    user's code.
    """
    first_line = (error_text(error).splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first_line[:MOST_CHARACTERS]}"
    line = line_of_user(traceback.extract_tb(error.__traceback__))
    return f"{text} ({line})" if line else text


def line_of_user(frames: traceback.StackSummary) -> str:
    """Return `/home/a/net.py, line 5: ...`, the innermost line of the user's code; "" if there is
    none.
    """
    here = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    others = (
        *(os.path.join(here, room, "") for room in ("farm", "tasks", "cli")),
        os.path.dirname(os.__file__),
        "<",
    )
    for frame in reversed(frames):
        if not frame.filename.startswith(others) and "-packages" not in frame.filename:
            return f"{frame.filename}, line {frame.lineno}: {frame.line}"
    return ""


def location_in(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's code, as " (/home/a/net.py, line 5: ...)"; "" if there is
    none.
    """
    line = line_of_user(frames)
    return f" ({line})" if line else ""


def location_of_model() -> str:
    """`location_in` the frames that run now, without those of the program that captures a model."""
    frames = traceback.extract_stack()
    here = os.path.dirname(os.path.dirname(__file__))
    while frames and not frames[0].filename.startswith(here):
        frames.pop(0)
    return location_in(frames)


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn any other error of this block, such as one of the user's model, into a `CaptureError`
    that begins with ``what``."""
    try:
        yield
    except FarmError:
        raise
    except Exception as error:
        usual = (
            "Check that the model can be built and runs on its input. `farm --debug ...` shows "
            "the traceback."
        )
        raise CaptureError(f"{what}: {told(error)}", next_step_after(error, usual)) from error


def next_step_after(error: BaseException, usual: str) -> str:
    """The next step after an error of the user's model: ``usual``, but for values that are nested
    too deeply."""
    if not isinstance(error, RecursionError):
        return usual
    return (
        "Values are nested in each other, or functions call each other, more often than Python "
        f"allows ({sys.getrecursionlimit():,} calls). Give lists and dictionaries with fewer "
        "levels."
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return 'Did you mean resnet50 or resnet34?', or '' if no known name is similar. A name that
    differs in case, spaces or punctuation alone is the only one.
    """
    lowered = {candidate.lower(): candidate for candidate in known}
    same = [lowered[each] for each in lowered if _letters(each) == _letters(name)]
    near = same or [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered)]
    return f"Did you mean {' or '.join(near)}?" if near else ""


def _letters(name: str) -> str:
    """The letters and digits of a name, in lower case: ``RTX-4090`` -> ``rtx4090``."""
    return "".join(filter(str.isalnum, name.lower()))
