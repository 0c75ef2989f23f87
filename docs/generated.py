"""Pages of the site that are made when it is built (a hook of MkDocs): the options of all commands,
from Typer itself, and those whose text stands outside of docs/. It also sees to it that no page
fetches anything from elsewhere."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from cli.main import app

ROOT = Path(__file__).parent.parent
#: Pages whose text stands elsewhere, and how docs/ links to it.
ELSEWHERE = {
    "index.md": "README.md",
    "glossary.md": "cli/glossary.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}

warnings = logging.getLogger("mkdocs.hooks.generated")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "options.md", content=options()))
    files.append(File.generated(config, "notebook.md", content=notebook()))
    for page, source in ELSEWHERE.items():
        text = re.sub(r"\]\((?:\.\./)?docs/", "](", (ROOT / source).read_text())
        for other, place in ELSEWHERE.items():
            text = text.replace(f"]({place})", f"]({other})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for page, source in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return markdown.replace("[notebook.ipynb](notebook.ipynb)", "[A notebook](notebook.md)")


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    for tag in re.findall(
        r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:\w+:)?//[^>]*>", output
    ):
        if 'rel="canonical"' not in tag:
            warnings.warning("%s is fetched from elsewhere: %s", page.file.src_uri, tag)
    return output


def notebook() -> str:
    """The notebook's cells, without what they show: a test runs them, nobody keeps their output."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    texts = (
        "".join(cell["source"])
        if cell["cell_type"] == "markdown"
        else fenced("".join(cell["source"]))
        for cell in cells
    )
    return "\n\n".join([*texts, "[The notebook itself](notebook.ipynb), to be run."])


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def options() -> str:
    """What `--help` says of every command, as Typer writes it in Markdown."""
    command = typer.main.get_command(app)
    with command.make_context("farm", [], resilient_parsing=True) as context:
        text = get_docs_for_click(
            obj=command, ctx=context, name="farm", title="Options of all commands"
        )
    text = re.sub(r"^(#+ )`(.*)`$", r"\1\2", text, flags=re.MULTILINE)
    text = re.sub(
        r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text
    )  # each has a heading, and here they are cut short
    return text.replace("# Options of all commands\n", OPENING, 1)


OPENING = """# Options of all commands

What `farm COMMAND --help` says, written by the program itself. What the commands do, what comes out of them and with
which exit code is told in [Commands](commands.md).
"""
