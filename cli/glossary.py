"""``farm help``: the meaning of the words in reports and messages. The entries are in ``cli/glossary.md``."""

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

GLOSSARY = Path(__file__).with_name("glossary.md")


def help_(
    context: typer.Context,
    words: list[str] | None = typer.Argument(
        None, metavar="[WORD]...", help="A word of a report, or a flag. Default: list all words."
    ),
) -> None:
    """Explain a word of a report: accuracy, coverage, a flag, a state."""
    from farm.types.value_profiles import is_class

    known = entries()
    if not words:
        show(Group(tables.Text(", ".join(known)), tables.hanging("`farm help WORD` explains a word.", "dim")))
        return
    asked = " ".join(words).lower()
    if asked not in known and is_class(asked):  # zeros-50+c90, at the end of a label
        asked = "class of data"
    found: dict[Entry, None] = {}
    for word in [asked] if asked in known else asked.split():
        if word not in known:
            commands = getattr(context.parent and context.parent.command, "commands", {})
            step = f"`farm {word} -h` describes the command." if word in commands else did_you_mean(word, known)
            step = step or "`farm help` lists the words; `farm COMMAND -h` describes a command."
            raise UsageError(f"The glossary has no '{word}'.", step)
        found |= dict.fromkeys(known[word])
    for names, text in found:
        show(Group(tables.Text(names, style="bold"), tables.hanging(text)))


def entries() -> dict[str, list[Entry]]:
    """Word -> its entries; a word may have several."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in re.findall(
        r"^- (.+?)(?=\n\n|\n- |\Z)", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        head, _, text = " ".join(entry.split()).partition(": ")
        names = re.findall(r"\*\*(.+?)\*\*", head)
        for name in [*names, *re.findall(r"\*\*(.+?)\*\*", text)]:
            found[name].append((", ".join(names), text.replace("**", "")))
    return dict(found)
