"""The options of `farm memory`, and amounts of memory as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError

# ----- amounts of memory as text: `80GB`, `24 GiB`, `55GB/s`, `50%`

_PREFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
#: A smaller number of bytes without a unit is most often one of gigabytes.
_LEAST_WITHOUT_UNIT = 10**6
_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def bytes_of(option: str, text: str, *, per_second: bool = False) -> int:
    """Parse an amount of memory, or a bandwidth, which may end with `/s`. Raises `UsageError` with
    the name of the option if the text is neither, or if it is below 1 byte, or a number without a
    unit below 1 MB."""
    match = _AMOUNT.fullmatch(text.removesuffix("/s") if per_second else text)
    amount = float(match[1]) * _PREFIXES[match[2].lower()] if match else 0.0
    if not math.isfinite(amount) or amount < 1:
        example, what = ("55GB/s", "a bandwidth") if per_second else ("80GB", "an amount of memory")
        raise UsageError(
            f"{option} needs {what}, not '{text}'.", f"Give, for example, {option} {example}."
        )
    if text.strip().isdigit() and amount < _LEAST_WITHOUT_UNIT:
        raise UsageError(
            f"{option} {text} has no unit: it means {text} bytes.",
            f"Give, for example, {option} {text}GB.",
        )
    return int(amount)


@dataclass(frozen=True)
class Amount:
    """A number of bytes, or a share of a total."""

    size_bytes: int = 0
    share: float = 0.0

    def of(self, whole_bytes: int) -> int:
        return int(self.share * whole_bytes) if self.share else self.size_bytes


def amounts_of(option: str, text: str) -> list[Amount]:
    """Parse a list of amounts and shares, such as ``75%,8GB``. Raises `UsageError` if an entry is
    neither.
    """
    amounts = []
    for word in text.split(","):
        if (percent := _SHARE.fullmatch(word)) and float(percent[1]) > 0:
            amounts.append(Amount(share=float(percent[1]) / 100))
        elif "%" in word:
            raise UsageError(
                f"{option} needs a share above 0, not '{word.strip()}'.",
                f"Give, for example, {option} 50%.",
            )
        else:
            amounts.append(Amount(bytes_of(option, word)))
    return amounts


# ----- the options of `farm memory`


@dataclass(frozen=True)
class MemoryOptions:
    """The options of `farm memory` other than the variant, as the user gave them. The constructor
    checks them.
    """

    card: str | None = None
    job: str = ""
    fit: str = ""
    offload: str = ""
    fast: str = ""
    slow_bandwidth: str = ""
    moves: bool = False
    run: bool = False
    what_if_recompute: bool = False
    config: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` if an amount is malformed, or if two options exclude each other."""
        for problem, step in self._contradictions():
            raise UsageError(problem, step)
        _ = self.limit_bytes, self.offload_bytes_per_s, self.amounts, self.slow_bytes_per_s

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield each contradiction of two options, and what to do."""
        if not self.fast and (self.slow_bandwidth or self.moves or self.run):
            yield (
                "--slow-bandwidth, --moves and --run need a plan.",
                "Give the size of fast memory: --fast 8GB.",
            )
        for option, value in (
            ("--job", self.job),
            ("--fit", self.fit),
            ("--what-if-recompute", self.what_if_recompute),
        ):
            if self.run and value:
                problem = (
                    f"{option} cannot be combined with --run, which runs one step with one batch."
                )
                yield problem, f"Omit {option} or --run."
        if self.moves and not self.run and self.slow_bandwidth in ("", "measured"):
            problem = (
                "--moves needs the bandwidth between fast and slow memory, which readings do not "
                "contain."
            )
            yield (
                problem,
                "Give the bandwidth (--slow-bandwidth 55GB/s), or measure it on a card of this "
                "host (--run).",
            )
        if self.job and self.card is not None:
            yield (
                "--card cannot be combined with --job: the job has a card.",
                "Omit --card or --job.",
            )

    @property
    def limit_bytes(self) -> int | None:
        return bytes_of("--fit", self.fit) if self.fit else None

    @property
    def offload_bytes_per_s(self) -> float | None:
        return bytes_of("--offload", self.offload, per_second=True) if self.offload else None

    @property
    def amounts(self) -> list[Amount]:
        return amounts_of("--fast", self.fast) if self.fast else []

    @property
    def slow_bytes_per_s(self) -> float | None:
        is_number = self.slow_bandwidth not in ("", "measured")
        return (
            bytes_of("--slow-bandwidth", self.slow_bandwidth, per_second=True)
            if is_number
            else None
        )
