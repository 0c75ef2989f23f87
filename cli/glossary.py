"""``farm help``: the meaning of the words in reports and messages. The entries are in
``cli/glossary.md``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container
from pathlib import Path

import typer
from rich.console import Group

from cli import tables
from cli.output import show
from farm.errors import UsageError, did_you_mean

Entry = tuple[str, str]  # names, and what they mean

_SMALL_WORDS = re.compile("a|all|and|at|between|by|for|from|in|not|of|on|per|the|to|with")
GLOSSARY = Path(__file__).with_name("glossary.md")


def help_(context: typer.Context, words: list[str] | None = None) -> None:
    """Explain a word of a report: accuracy, coverage, a flag, a state."""
    from farm.types.value_profiles import is_class

    glossary = entries()
    if not words:
        hint = tables.hanging("`farm help WORD` explains a word.", "dim")
        show(Group(tables.Text(", ".join(glossary)), hint))
        return
    asked = " ".join(words)
    if asked.lower() not in glossary and is_class(asked.lower()):
        asked = "class of data"  # such as zeros-50+c90, at the end of a label
    explained, unknown = find(asked)
    for word in unknown:
        commands = getattr(context.parent and context.parent.command, "commands", {})
        step = did_you_mean(word, glossary)
        if word in commands:
            step = f"`farm {word} -h` describes the command."
        step = step or "`farm help` lists the words; `farm COMMAND -h` describes a command."
        raise UsageError(f"The glossary has no '{word}'.", step)
    for names, text in explained:
        show(Group(tables.Text(names, style="bold"), tables.hanging(text)))


def find(text: str) -> tuple[list[Entry], list[str]]:
    """Return the entries of the terms in a text, of several words or one, and the words without an
    entry.
    """
    glossary = entries()
    words = re.findall(r"[^\s,;:()>]+", text.lower())
    explained: dict[Entry, None] = {}
    unknown: list[str] = []
    while words:
        number, term = _longest_term(words, glossary)
        small = number == 1 and _SMALL_WORDS.fullmatch(words[0]) and len(text.split()) > 1
        if term and not small:
            explained |= dict.fromkeys(glossary[term])
        elif not small and words[0].strip("×%0123456789"):
            unknown.append(words[0])
        words = words[number:]
    return list(explained), unknown


def _longest_term(words: list[str], glossary: Container[str]) -> tuple[int, str]:
    """Return the longest term of the glossary that begins a list of words, also in the plural, and
    its number of words; (1, "") if there is none.
    """
    for number in range(len(words), 0, -1):
        plural = " ".join(words[:number])
        for term in (plural, plural.removesuffix("s")):
            if term in glossary:
                return number, term
    return 1, ""


def entries() -> dict[str, list[Entry]]:
    """Word in lower case -> its entries; a word may have several."""
    by_word: dict[str, list[Entry]] = defaultdict(list)
    glossary = GLOSSARY.read_text(encoding="utf-8")
    for entry in re.findall(r"^- (.+?)(?=\n\n|\n- |\Z)", glossary, re.MULTILINE | re.DOTALL):
        head, _, text = " ".join(entry.split()).partition(": ")
        names = re.findall(r"\*\*(.+?)\*\*", head)
        for name in [*names, *re.findall(r"\*\*(.+?)\*\*", text)]:
            by_word[name.lower()].append((", ".join(names), text.replace("**", "")))
    return dict(by_word)
