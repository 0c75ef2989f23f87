"""The seeded list of faults of a soak, and the record of what happened to each: the soak can be
stopped and resumed.

A seed fixes the faults, their order and what they draw. It does not fix what they meet, so two
soaks of a seed differ."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Fault:
    """One fault of the list. It is tried until its effect was observed."""

    number: int
    kind: str
    host: int
    tries: int = 0

    def chance(self, seed: int) -> Random:
        return Random(f"{seed}/{self.number}/{self.tries}")


@dataclass(frozen=True)
class Outcome:
    """One try of a fault: what was observed, or why it does not count."""

    number: int
    tries: int
    kind: str
    host: str
    begin_s: float
    end_s: float
    observed: str = ""
    why_not: str = ""


def drawn(kinds: Sequence[str], number: int, hosts: int, seed: int) -> list[Fault]:
    """Draw the list: each kind equally often, in random order; in short lists each kind once before
    any repeats.
    """
    chance = Random(seed)
    rounds = [chance.sample(kinds, len(kinds)) for _ in range(-(-number // len(kinds)))]
    names = [kind for one in rounds for kind in one][:number]
    if number > 2 * len(kinds):
        chance.shuffle(names)
    return [Fault(index, kind, chance.randrange(hosts)) for index, kind in enumerate(names)]


class Record:
    """The file `faults.jsonl`: one line per try."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self.outcomes = [Outcome(**json.loads(line)) for line in lines]

    def add(self, outcome: Outcome) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
            self.outcomes.append(outcome)

    @property
    def observed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.observed]

    def by_kind(self) -> Counter[str]:
        return Counter(one.kind for one in self.observed)

    def by_variant(self) -> Counter[tuple[str, str]]:
        return Counter((one.kind, one.observed.partition(":")[0]) for one in self.observed)

    def left(self, faults: Iterable[Fault]) -> deque[Fault]:
        """The faults that were not observed yet, those with the fewest tries first."""
        done = {one.number for one in self.observed}
        tries = Counter(one.number for one in self.outcomes)
        found = [
            Fault(one.number, one.kind, one.host, tries[one.number])
            for one in faults
            if one.number not in done
        ]
        return deque(sorted(found, key=lambda one: one.tries))
