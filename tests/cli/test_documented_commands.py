"""What the docs and the README tell people to type: every command is run here as it stands, or says
what it needs.

A block of commands is indented, or fenced as `console`; everything else is fenced with its
language. A fence of text after `console` is what the command prints (tests/test_shown_output.py). `<!-- needs: a card -->` stands before a block that cannot be run here, `<!-- this page
needs: many hosts -->` before all of a page. Such commands are still parsed, so that no option or
name is told that is not there."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token

from cli.commands import with_joined_name
from cli.main import app
from cli.options import with_compile_mode
from farm.settings import settings
from farm.store.database import Database
from farm.types.software import Software
from farm.types.variant import Variant
from tests import slow
from tests.report import filled, rows
from tests.report.measured import measured

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "cli/glossary.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
NEEDS = re.compile(r"<!-- (this page )?needs: (.+) -->")
#: What a command that is not run may need; a reader without it knows that it is not for them.
OF_CONTRIBUTORS = "a copy of the source"  # tests/test_pages_for_contributors.py follows the page
REASONS = {
    "a card",
    "a network",
    "many hosts",
    "another farm's export",
    OF_CONTRIBUTORS,
    "a file of weights",
}
JOB, LATER_JOB, READING = "fftvspd5", "hnf3fq8x", "9" * 32
PLACEHOLDERS = {"JOB": JOB, "LATER_JOB": LATER_JOB, "READING": READING}
COMMAND = typer.main.get_command(app)


@dataclass
class Block:
    page: str
    line: int
    language: str  # "" for commands
    file: str  # the name that it is shown with: what is run after it finds it there
    text: str
    needs: str
    console: bool
    shown: str = ""  # what the page says that the command prints: the fence of text after it


@functools.cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


@functools.cache
def blocks(page: Path) -> list[Block]:
    """The blocks of a page. A fence `console` and a fence `text` after it are one block."""
    result = list(_blocks(page))
    for block, after in itertools.pairwise(result):
        if block.console and after.language == "text":
            block.shown = after.text
    return result


def _blocks(page: Path) -> Iterator[Block]:
    whole = needs = ""
    for token in tokens(page):
        if token.type == "html_block" and (found := NEEDS.fullmatch(token.content.strip())):
            if found[1]:
                whole = found[2]
            else:
                needs = found[2]
        elif token.type in ("fence", "code_block"):
            language = (
                token.info.split()[0] if token.info else "text" if token.type == "fence" else ""
            )
            console = language == "console"
            language = "" if console else language
            title = re.search(r'title="(.+?)"', token.info)
            where = name_of(page), (token.map or [0])[0] + 1
            file = title[1] if title else ""
            yield Block(*where, language, file, token.content, needs or whole, console)
            needs = ""


def all_blocks() -> Iterator[Block]:
    return (block for page in PAGES for block in blocks(page))


def spans() -> set[tuple[str, str]]:
    """(page, `farm ...` in a sentence of it)"""
    return {
        (name_of(page), child.content)
        for page in PAGES
        for token in tokens(page)
        for child in token.children or ()
        if child.type == "code_inline" and child.content.startswith("farm ")
    }


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a block, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def of_farm(words: list[str]) -> list[str] | None:
    """The arguments of `farm`, where it is what a command calls, by whatever way."""
    for index, word in enumerate(words):
        if word.endswith("bin/farm") or (
            word == "farm" and all("=" in before for before in words[:index])
        ):
            return words[index + 1 :]
    return None


def known_options(command) -> set[str]:
    options = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return {*options, "-h", "--help"}


def parse(arguments: list[str], *, whole: bool) -> None:
    """Parse as `farm` does, without calling anything; of what is not whole, only the names of verbs
    and options.
    """
    words = with_compile_mode(with_joined_name(list(arguments)))
    command, path, rest = COMMAND, "farm", words
    while hasattr(command, "commands"):
        while rest and rest[0].startswith("-"):
            assert rest[0] in known_options(command), f"{path} {rest[0]}"
            rest.pop(0)
        if not rest or (not whole and (rest[0].isupper() or rest[0] == "...")):
            return
        assert rest[0] in command.commands or not command.no_args_is_help, (
            f"there is no `{path} {rest[0]}`"
        )
        if rest[0] not in command.commands:
            break
        command, path = command.commands[rest[0]], f"{path} {rest.pop(0)}"
    if whole:
        command.make_context(path, rest)
    else:
        told = {
            re.split(r"[=\]]", word.lstrip("["))[0]
            for word in rest
            if re.match(r"\[?--?[a-z]", word)
        }
        assert told <= known_options(command), f"{path}: {told - known_options(command)}"


def test_what_is_not_run_says_what_it_needs():
    for block in all_blocks():
        where = f"{block.page}:{block.line}"
        assert not block.needs or block.needs in REASONS, f"{where}: {block.needs}"
        if not block.language and not block.needs:
            for words in commands(block.text):
                assert of_farm(words) is not None or words[0] == "export", (
                    f"{where}: `{words[0]}` says not what it needs"
                )


def test_every_command_stands_in_a_block_and_every_output_has_text():
    """A line that lost its indentation is part of a paragraph: nothing would run it."""
    for page in PAGES:
        for before, token in itertools.pairwise(tokens(page)):
            if before.type == "paragraph_open":
                assert not re.match(r"(farm|export) \S", token.content), (
                    f"{name_of(page)}: {token.content}"
                )
            if token.type in ("fence", "code_block"):
                assert token.content.strip(), f"{name_of(page)}: an empty block"


def write_module(block, folder, monkeypatch):
    monkeypatch.setattr(
        sys, "path", [folder for folder in sys.path if not Path(folder, block.file).exists()]
    )
    (folder / block.file).write_text(block.text)
    monkeypatch.setitem(
        sys.modules, Path(block.file).stem, sys
    )  # other tests have modules of that name:
    del sys.modules[Path(block.file).stem]  # theirs is put aside, and this page's taken away


def test_every_command_that_is_told_can_be_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in all_blocks():
        if block.file and not block.needs:  # a model may be given by the location of its file
            write_module(block, tmp_path, monkeypatch)
    monkeypatch.setenv("FARM_MODELS", '{"my_net": "my_models:net"}')
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    settings.cache_clear()
    told = [
        (block, words)
        for block in all_blocks()
        if not block.language and block.needs != OF_CONTRIBUTORS
        for words in commands(block.text)
    ]
    calls = [
        (block, arguments) for block, words in told if (arguments := of_farm(words)) is not None
    ]
    assert len(calls) > 40
    for block, arguments in calls:
        try:
            parse(arguments, whole=True)
        except Exception as error:
            pytest.fail(f"{block.page}:{block.line}: farm {shlex.join(arguments)}: {error!r}")


def test_every_command_in_a_sentence_is_there():
    for page, span in sorted(spans()):
        try:
            parse(shlex.split(span.replace("'", " "))[1:], whole=False)
        except Exception as error:
            pytest.fail(f"{page}: `{span}`: {error!r}")


@pytest.fixture(scope="module")
def farm_with_jobs(tmp_path_factory):
    """The file of a database as the pages take it for given: two jobs on an H200, and other
    readings.
    """
    home = tmp_path_factory.mktemp("documented")
    database = Database(f"sqlite:///{home / 'farm.db'}")
    database.upgrade()
    measured(database, rows.VARIANT, JOB)
    measured(database, rows.VARIANT, LATER_JOB)
    newer = Software(
        torch="2.12.0+cu130",
        torchvision="0.27.0",
        cuda="13.0",
        cudnn="91900",
        driver="580.1",
        python="3.12",
    )
    for dtype in ("float32", "bfloat16"):
        filled.fill(database, Variant("resnet18", 32, 224, dtype=dtype), software=newer)
    filled.fill(
        database, Variant("resnet18", 32, 224), software=newer, card="GPU-1", model="NVIDIA H100"
    )
    database.close()
    return home / "farm.db"


SLOW = [
    ROOT / f"docs/{name}.md"
    for name in ("python", "memory", "prediction", "language-models", "other-cards", "compare")
]  # they measure, capture steps, import and fit


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[slow.MEASURED] * (page in SLOW),
        )
        for page in PAGES
    ],
    ids=name_of,
)
def test_the_commands_of_a_page_run_in_their_order(
    page, farm, farm_with_jobs, tmp_path, monkeypatch
):
    shutil.copy(farm_with_jobs, tmp_path / "farm.db")
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{tmp_path / 'farm.db'}")
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for block in (block for block in blocks(page) if not block.needs and not block.shown):
        where = f"{block.page}:{block.line}"
        if block.file:
            write_module(block, tmp_path, monkeypatch)
        elif block.language == "python":
            exec(compile(block.text, where, "exec"), {})
        elif not block.language:
            for words in commands(block.text):
                if words[0] == "export":
                    for name, value in (word.split("=", 1) for word in words[1:]):
                        monkeypatch.setenv(name, os.path.expandvars(value))
                    settings.cache_clear()
                else:
                    said = farm(*(PLACEHOLDERS.get(word, word) for word in of_farm(words)))
                    assert said.code == 0, f"{where}: {shlex.join(words)}\n{said.stderr}"
