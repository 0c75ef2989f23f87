"""The ids that a language model reads where nobody gives a text: of a small corpus that ships with the farm. No torch.

Requirements this file answers:

- Ids have a text's distribution and not a uniform one, because what was just read lies in a card's cache: few rows of an
  embedding are read very often, most hardly ever, and new ones come ever more slowly as a text goes on.
- They are equal on every machine, since a variant's id is made of them. So the corpus is read as the ids that four
  tokenizers, each of another kind and trained on it, gave once (`benchmarks/text_ids.py`): nothing is trained here, and
  the library `tokenizers` need not be there.
- They fit a model's own vocabulary, which is larger than any that a small corpus could train.

So a token is known by its *rank*, by how often it occurs in the corpus. The ranks of tokens that occur at least
`OFTEN` times are a model's lowest ids that are no special ones, as vocabularies of all kinds are sorted by frequency, or
nearly so. The ids of the seldom ones are spread over the rest of the vocabulary. A text longer than the corpus begins it
again, but takes its seldom tokens from a larger choice: it is another text of the same language, some of whose rare words
are new. The choice grows with the root of the text's length, as the words of a text do (Heaps' law).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import UsageError, did_you_mean
from farm.types.tokens import SIDES, Tokens, check_size

if TYPE_CHECKING:
    import numpy as np

FOLDER = Path(__file__).parent
#: What tokenizers there are: as BERT's; as GPT-2's, RoBERTa's and Llama 3's; as T5's, ALBERT's and XLNet's; as Llama 2's.
KINDS = ("wordpiece", "byte_level", "unigram", "bpe")
#: Times that a token occurs in the corpus to be a common one, whose id never changes.
OFTEN = 5


@dataclass(frozen=True)
class Specials:
    """The ids of a model that no text gives.

    ``first`` and ``last`` stand around each row (BERT: 101 and 102), ``pad`` fills it up on the side ``padding``;
    ``others`` occur in no row.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    pad: int = 0
    padding: str = "right"
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.padding not in SIDES:
            raise UsageError(f"padding '{self.padding}' is unknown.", f"Choose one of {', '.join(SIDES)}.")

    @property
    def around(self) -> int:
        """Tokens of each row that are no text."""
        return len(self.first) + len(self.last)

    @property
    def all(self) -> frozenset[int]:
        return frozenset((*self.first, *self.last, self.pad, *self.others))


@dataclass(frozen=True)
class _Corpus:
    """The corpus of one kind: a rank for each token, where its paragraphs end, and how many ranks are common."""

    ranks: np.ndarray
    ends: np.ndarray
    used: int
    common: int


def token_ids(
    kind: str, vocabulary: int, batch: int, length: int, *, padded: bool = False, specials: Specials | None = None
) -> Tokens:
    """``batch`` rows of ``length`` ids below ``vocabulary``, of the farm's own corpus; equal wherever it runs.

    Without ``padded`` every row is full, and each goes on where the one before it ended. With it, rows are as long as the
    paragraphs of the text come: a row has as many whole paragraphs as fill half of it on average (at least one), is cut
    where these are more than it holds, and padded where they are less.

    Raises:
        UsageError: no such kind; a size that is none; a vocabulary or length that leaves no room for a text.
    """
    if kind not in KINDS:
        raise UsageError(
            f"There is no tokenizer of the kind '{kind}'.", did_you_mean(kind, KINDS) or f"There is {', '.join(KINDS)}."
        )
    check_size(batch, length)
    specials = specials or Specials()
    text = _corpus(kind)
    ids = _Vocabulary(text, vocabulary, specials)
    room = room_for_text(length, specials.around)
    if padded:
        rows = [ids.of(begin, min(end, begin + room)) for begin, end in paragraph_rows(text.ends, batch, room)]
    else:
        rows = list(ids.of(0, batch * room).reshape(batch, room))
    return in_rows(rows, length, specials)


def room_for_text(length: int, around: int) -> int:
    """Tokens of text in a row.

    Raises:
        UsageError: there are none.
    """
    if length <= around:
        raise UsageError(
            f"A row of {length} tokens has no room for a text beside {around} special ones.",
            f"Ask for a length of {around + 1} or more.",
        )
    return length - around


def in_rows(rows: list[np.ndarray], length: int, specials: Specials) -> Tokens:
    """Rows of text alone, with the special ids around them."""
    import numpy as np

    whole = [np.concatenate([specials.first, row, specials.last]).astype(np.int64) for row in rows]
    return Tokens.of_rows(whole, length, pad=specials.pad, padding=specials.padding)


@cache
def _corpus(kind: str) -> _Corpus:
    import numpy as np

    with np.load(FOLDER / f"{kind}.npz", allow_pickle=False) as stored:
        ranks, ends, occurrences = (stored[name].astype(np.int64) for name in ("ranks", "ends", "occurrences"))
    return _Corpus(ranks, ends, len(occurrences), int((occurrences >= OFTEN).sum()))


class _Vocabulary:
    """How a model numbers the corpus' tokens."""

    def __init__(self, text: _Corpus, vocabulary: int, specials: Specials) -> None:
        import numpy as np

        self._text = text
        free = np.setdiff1d(np.arange(vocabulary), sorted(specials.all))
        if not len(free):
            raise UsageError(
                f"A vocabulary of {vocabulary} leaves no id for a text.", "Give the size of the model's vocabulary."
            )
        if outside := [number for number in sorted(specials.all) if not 0 <= number < vocabulary]:
            raise UsageError(
                f"The special id {outside[0]} is not in a vocabulary of {vocabulary}.", "Give the model's own ids."
            )
        # Of a vocabulary smaller than the corpus' own, ids stand for several tokens.
        self._common, self._rest = (free[: text.common], free[text.common :]) if len(free) > text.used else (free, free)
        self._step = _step(len(self._rest))

    def of(self, begin: int, end: int) -> np.ndarray:
        """The ids of the tokens from place ``begin`` to ``end`` of a text that never ends."""
        import numpy as np

        passes, place = np.divmod(np.arange(begin, end), len(self._text.ranks))
        rank = self._text.ranks[place]
        rare = self._text.used - self._text.common
        seldom = rank - self._text.common
        # In whole numbers alone: a float's last digit is not the same everywhere.
        choice = np.array(
            [math.isqrt(rare * rare * (number + 1)) for number in range(end // len(self._text.ranks) + 1)]
        )
        number = (seldom + passes * rare) % choice[passes]
        rest = self._rest[number * self._step % len(self._rest)]
        return np.where(seldom < 0, self._common[rank % len(self._common)], rest)


def _step(size: int) -> int:
    """From one seldom id to the next: meets all of ``size`` before one comes twice, and spreads even a few evenly."""
    step = max(1, round(size * 0.618))
    while math.gcd(step, size) > 1:
        step += 1
    return step


def paragraph_rows(ends: np.ndarray, batch: int, room: int) -> list[tuple[int, int]]:
    """Where each row begins and ends, in tokens of a text that never ends: whole paragraphs, half of a row on average.

    ``ends`` says where each paragraph of the text ends.
    """
    paragraphs, tokens = len(ends), int(ends[-1])
    together = max(1, round(room * paragraphs / tokens / 2))

    def place(number: int) -> int:
        """Where the ``number``-th paragraph begins."""
        passes, within = divmod(number, paragraphs)
        return passes * tokens + (int(ends[within - 1]) if within else 0)

    return [(place(row * together), place((row + 1) * together)) for row in range(batch)]


def corpus() -> list[str]:
    """The paragraphs of the corpus itself, which nothing but the training of its tokenizers reads."""
    return [part for part in (FOLDER / "corpus.txt").read_text(encoding="utf-8").split("\n\n") if part.strip()]
