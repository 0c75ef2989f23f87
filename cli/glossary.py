"""``farm help``: the meaning of the words in reports and messages. The entries are in
``cli/glossary.md``.
"""

from __future__ import annotations

import re
from collections import defaultdict
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

    known = entries()
    if not words:
        show(
            Group(
                tables.Text(", ".join(known)),
                tables.hanging("`farm help WORD` explains a word.", "dim"),
            )
        )
        return
    asked = " ".join(words)
    # zeros-50+c90, at the end of a label
    found, unknown = find(
        "class of data" if asked.lower() not in known and is_class(asked.lower()) else asked
    )
    for word in unknown:
        commands = getattr(context.parent and context.parent.command, "commands", {})
        step = (
            f"`farm {word} -h` describes the command."
            if word in commands
            else did_you_mean(word, known)
        )
        step = step or "`farm help` lists the words; `farm COMMAND -h` describes a command."
        raise UsageError(f"The glossary has no '{word}'.", step)
    for names, text in found:
        show(Group(tables.Text(names, style="bold"), tables.hanging(text)))


def find(text: str) -> tuple[list[Entry], list[str]]:
    """Return the entries of the terms in a text, of several words or one, and the words without an
    entry.
    """
    known, words = entries(), re.findall(r"[^\s,;:()>]+", text.lower())
    found: dict[Entry, None] = {}
    unknown: list[str] = []
    while words:
        terms = {number: " ".join(words[:number]) for number in range(len(words), 0, -1)}
        forms = (
            (number, one)
            for number, term in terms.items()
            for one in (term, term.removesuffix("s"))
        )
        number, term = next(((number, one) for number, one in forms if one in known), (1, ""))
        small = number == 1 and _SMALL_WORDS.fullmatch(words[0]) and len(text.split()) > 1
        if term and not small:
            found |= dict.fromkeys(known[term])
        elif not small and words[0].strip("×%0123456789"):
            unknown.append(words[0])
        words = words[number:]
    return list(found), unknown


def entries() -> dict[str, list[Entry]]:
    """Word in lower case -> its entries; a word may have several."""
    found: dict[str, list[Entry]] = defaultdict(list)
    glossary = GLOSSARY.read_text(encoding="utf-8")
    for entry in re.findall(r"^- (.+?)(?=\n\n|\n- |\Z)", glossary, re.MULTILINE | re.DOTALL):
        head, _, text = " ".join(entry.split()).partition(": ")
        names = re.findall(r"\*\*(.+?)\*\*", head)
        for name in [*names, *re.findall(r"\*\*(.+?)\*\*", text)]:
            found[name.lower()].append((", ".join(names), text.replace("**", "")))
    return dict(found)
