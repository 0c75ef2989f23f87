"""Token ids as inputs of language models: from the farm's own small corpus or from a user's text.
No torch.

Requirements:

- Ids have the distribution of a text, not a uniform one, because it affects a card's cache: a text
  reads few rows of an embedding very often and most almost never; new rows become rarer.
- Ids are equal on every machine, because a variant's id depends on them. So the corpus is stored as
  the ids of four tokenizers of different kinds that were trained on it once
  (`benchmarks/text_ids.py`).
- Ids fit a model's own vocabulary, which is larger than a vocabulary trained on a small corpus.

So each token is identified by its *rank* by frequency in the corpus. Tokens that occur at least
`COMMON_FROM` times get a model's lowest ids that are not special: vocabularies of all kinds are
nearly sorted by frequency. The ids of rare tokens are spread over the rest of the vocabulary. A
text longer than the corpus starts the corpus again, with rare tokens from a larger choice, which
grows with the square root of the text's length (Heaps' law)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import UsageError, did_you_mean, reading_package
from farm.types.distribution import spreading_step
from farm.types.tokens import SIDES, Tokens, check_size

if TYPE_CHECKING:
    import numpy as np

FOLDER = Path(__file__).parent
#: The kinds of tokenizers, in order: BERT's; GPT-2's, RoBERTa's and Llama 3's; T5's, ALBERT's and
#: XLNet's; Llama 2's.
KINDS = ("wordpiece", "byte_level", "unigram", "bpe")
#: A token with at least this many occurrences in the corpus is common: its id never changes.
COMMON_FROM = 5


@dataclass(frozen=True)
class Specials:
    """The special ids of a model: ids that are not text.

    ``first`` and ``last`` surround each row (BERT: 101 and 102), ``pad`` fills it on the side
    ``padding``; ``others`` occur in no row."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    pad: int = 0
    padding: str = "right"
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.padding not in SIDES:
            raise UsageError(
                f"The padding side '{self.padding}' is unknown.",
                f"Choose one of {', '.join(SIDES)}.",
            )

    @property
    def around(self) -> int:
        """The number of tokens in each row that are not text."""
        return len(self.first) + len(self.last)

    @property
    def all(self) -> frozenset[int]:
        return frozenset((*self.first, *self.last, self.pad, *self.others))


@dataclass(frozen=True)
class _Corpus:
    """The corpus of one kind: the rank of each token, the ends of paragraphs, the numbers of ranks
    and common ranks.
    """

    ranks: np.ndarray
    ends: np.ndarray
    used: int
    common: int


def token_ids(
    tokenizer: str,
    vocabulary: int,
    batch: int,
    length: int,
    *,
    padded: bool = False,
    specials: Specials | None = None,
) -> Tokens:
    """``batch`` rows of ``length`` ids below ``vocabulary``, from the farm's own corpus; equal on
    every machine. If ``padded``, rows contain whole paragraphs and are padded to ``length``
    (`row_spans`). Raises `UsageError` if there is no such kind, a size is wrong, or the vocabulary
    or length leaves no room for a text."""
    import numpy as np

    if tokenizer not in KINDS:
        step = did_you_mean(tokenizer, KINDS) or f"Choose one of {', '.join(KINDS)}."
        raise UsageError(f"There is no built-in tokenizer '{tokenizer}'.", step)
    check_size(batch, length)
    specials, text = specials or Specials(), _corpus(tokenizer)
    spans = row_spans(text.ends, batch, room_for_text(length, specials.around), padded=padded)
    ids = _ids(np.concatenate([np.arange(*span) for span in spans]), text, vocabulary, specials)
    return in_rows(
        np.split(ids, np.cumsum([end - begin for begin, end in spans])[:-1]), length, specials
    )


def room_for_text(length: int, around: int) -> int:
    """The number of text tokens in a row; `UsageError` if there is no room for any."""
    if length <= around:
        problem = (
            f"A row of {length} tokens has no room for a text, because {around} of its tokens are "
            "special tokens."
        )
        raise UsageError(problem, f"Give a length of {around + 1} or more.")
    return length - around


def in_rows(rows: list[np.ndarray], length: int, specials: Specials) -> Tokens:
    """Adds the special ids and the padding to rows of text ids."""
    import numpy as np

    whole = [np.concatenate([specials.first, row, specials.last]).astype(np.int64) for row in rows]
    return Tokens.of_rows(whole, length, pad=specials.pad, padding=specials.padding)


@cache
def _corpus(tokenizer: str) -> _Corpus:
    import numpy as np

    file = FOLDER / f"{tokenizer}.npz"
    with reading_package(file), np.load(file, allow_pickle=False) as stored:
        ranks, ends, occurrences = (
            stored[name].astype(np.int64) for name in ("ranks", "ends", "occurrences")
        )
    return _Corpus(ranks, ends, len(occurrences), int((occurrences >= COMMON_FROM).sum()))


def _ids(positions: np.ndarray, text: _Corpus, vocabulary: int, specials: Specials) -> np.ndarray:
    """Return the tokens at the positions ``places`` of the corpus, as ids of a model's vocabulary.

    Positions after the end of the corpus continue at its start.
    """
    import numpy as np

    is_free = np.ones(vocabulary, bool)
    is_free[[number for number in specials.all if 0 <= number < vocabulary]] = False
    free = np.flatnonzero(is_free)
    if not len(free):
        problem = f"A vocabulary of {vocabulary} ids has only special ids and none for a text."
        raise UsageError(problem, "Give the size of the model's vocabulary.")
    if outside := [number for number in sorted(specials.all) if not 0 <= number < vocabulary]:
        problem = f"The special id {outside[0]} is outside the vocabulary of {vocabulary} ids."
        raise UsageError(problem, "Give the special ids of the model.")
    # In a vocabulary smaller than that of the corpus, several tokens share one id.
    common, others = (
        (free[: text.common], free[text.common :]) if len(free) > text.used else (free, free)
    )
    passes, position = np.divmod(positions, len(text.ranks))
    rank, rare = text.ranks[position], text.used - text.common
    # Use integers only: the last digit of a float may differ between machines.
    choice = np.array(
        [math.isqrt(rare * rare * (number + 1)) for number in range(passes.max() + 1)]
    )
    number = (rank - text.common + passes * rare) % choice[passes]
    return np.where(
        rank < text.common,
        common[rank % len(common)],
        others[number * spreading_step(len(others)) % len(others)],
    )


def row_spans(ends: np.ndarray, batch: int, room: int, *, padded: bool) -> list[tuple[int, int]]:
    """The begin and end of the text of each row, as token positions in an endlessly repeated text.

    ``ends`` are the ends of the text's paragraphs. If ``padded``, a row has as many whole
    paragraphs as fill half of it on average (at least one), cut to the room. Otherwise every row is
    full and continues the one before."""
    if not padded:
        return [(row * room, (row + 1) * room) for row in range(batch)]
    paragraphs, tokens = len(ends), int(ends[-1])
    together = max(1, round(room * paragraphs / tokens / 2))
    begins = []
    for row in range(batch + 1):
        passes, within = divmod(row * together, paragraphs)
        begins.append(passes * tokens + (int(ends[within - 1]) if within else 0))
    return [(begin, min(end, begin + room)) for begin, end in itertools.pairwise(begins)]
