"""The ids of people's texts that this process has at hand, by the id that a variant names them by.

A variant says which ids it reads and does not hold them. Whoever has them (from a text that was just given, from the database,
from a request to measure) puts them here before a model is asked for its inputs.
"""

from __future__ import annotations

from farm.errors import UsageError
from farm.types.tokens import Tokens

_known: dict[str, Tokens] = {}


def know(tokens: Tokens, *, alone: bool = False) -> str:
    """Their id, under which they are at hand from now on.

    Args:
        alone: forget all others, in a process that lives long and is given each time what it needs.
    """
    if alone:
        _known.clear()
    _known[tokens.id] = tokens
    return tokens.id


def is_known(text: str) -> bool:
    return text in _known


def known(text: str) -> Tokens:
    """
    Raises:
        UsageError: they are not at hand; only the text itself brings them here, as another farm does not hand them on.
    """
    if text not in _known:
        raise UsageError(
            f"The token ids of the text {text} are not at hand.", "Give the text again, with --text and --tokenizer."
        )
    return _known[text]
