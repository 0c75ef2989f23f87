"""Every command, option, setting and key for users is documented."""

import ast
import inspect
import itertools
import re
import shlex
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer
from sqlalchemy import text
from typer.testing import CliRunner

import farm
from benchmarks import results_page
from cli import main
from cli.commands import all_commands, with_joined_name
from cli.main import app
from cli.options import with_compile_mode
from farm.requests.partial_request import GIVEN
from farm.settings import Settings
from farm.subjects.sweep import RECIPES
from tests import slow
from tests.test_imports import ORDER

DOCS = Path(__file__).parent.parent / "docs"
ROOT = DOCS.parent
README = ROOT / "README.md"
PACKAGES = ["cli", "tasks", *(f"farm/{room}" for room in ORDER)]
PACKAGES += [f"farm/addons/{name}" for name in ("check", "memory", "pages", "predict")]
#: Those that consist of modules. `farm/errors` and `farm/settings` are one file each, with data.
ROOMS = [
    room
    for room in PACKAGES
    if (ROOT / room).is_dir() and room not in ("farm/errors", "farm/settings")
]


def commands(group, path="farm"):
    for name, command in sorted(group.commands.items()):
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")


def section(title):
    """Return the text below a heading, up to the next heading of any level."""
    text = (DOCS / "commands.md").read_text()
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/commands.md has no heading '{title}'"
    return found.group(1)


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_option_is_documented(path):
    text = section(path)
    if path in ("farm submit", "farm compare"):
        text += section("farm run")
    missing = [
        option
        for parameter in COMMANDS[path].params
        for option in [*parameter.opts, *parameter.secondary_opts]
        if option.startswith("-") and option not in ("--help", "-h") and f"`{option}" not in text
    ]
    assert not missing
    assert COMMANDS[path].help


@pytest.mark.parametrize("path", COMMANDS)
def test_every_help_ends_with_an_example(path):
    assert COMMANDS[path].epilog.startswith(f"Example: {path}")


@pytest.mark.parametrize("group", [[], ["predict"]])
def test_a_list_of_commands_breaks_no_line_of_their_help(group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, [*group, "--help"]).stdout
    path = " ".join(["farm", *group])
    for name, command in COMMANDS.items():
        if command.short_help and name.rpartition(" ")[0] == path:
            assert f" {command.short_help} " in shown, name


def test_an_option_is_written_in_the_same_way_in_every_command():
    options = defaultdict(set)
    for command in COMMANDS.values():
        for parameter in command.params:
            if parameter.opts[0].startswith("-"):
                options[max(parameter.opts, key=len)].add(
                    (*sorted(parameter.opts), *parameter.secondary_opts)
                )
    assert not {name: ways for name, ways in options.items() if len(ways) > 1}


def test_every_documented_command_exists():
    headings = re.findall(r"^##+ (farm .+)$", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert set(headings) == set(COMMANDS)


def test_the_options_of_farm_itself_are_documented():
    text = (DOCS / "commands.md").read_text()
    for option in ("--debug", "--quiet", "--version", "--install-completion", "--show-completion"):
        assert option in text


def test_every_setting_is_documented_with_its_default():
    text = (DOCS / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))
    assert set(rows) == set(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, bool):
            assert rows[name] == f"`{str(field.default).lower()}`"
        elif isinstance(field.default, int | float):
            assert rows[name] == f"`{field.default:g}`"


def test_every_key_of_a_measurement_file_is_documented():
    text = (DOCS / "measurement-files.md").read_text()
    for key in GIVEN:
        assert f"`{key}`" in text, key
    for operator, recipe in RECIPES.items():
        assert f"`{operator}`" in text, operator
        for name in recipe.names:
            assert f"`{name}`" in text, f"{operator}: {name}"


def test_the_example_of_a_measurement_file_is_one():
    from farm.models.catalog import resolve
    from farm.requests.measurement_file import parse

    (example,) = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "measurement-files.md").read_text(), re.DOTALL
    )
    wishes = parse(example, "example.yml", resolve_model=resolve)
    assert len([wish for wish in wishes if wish.model]) == 9
    assert [wish.sweep.size for wish in wishes if wish.sweep] == [96]


@pytest.mark.parametrize(
    "path", sorted((DOCS.parent / "examples").glob("*.yml")), ids=lambda path: path.name
)
def test_the_examples_are_measurement_files(path):
    from farm.requests.measurement_file import load

    assert load([path])


def test_the_example_of_a_settings_file_is_one(tmp_path, monkeypatch):
    (example,) = re.findall(r"```toml\n(.*?)```", (DOCS / "settings.md").read_text(), re.DOTALL)
    path = tmp_path / "farm.toml"
    path.write_text(example)
    monkeypatch.setenv("FARM_CONFIG", str(path))
    assert Settings().models == {"my_net": "my_package.models:my_net"}


def test_the_documented_questions_to_the_database_can_be_asked(any_database):
    questions = re.findall(r"```sql\n(.*?)```", (DOCS / "data-model.md").read_text(), re.DOTALL)
    assert questions
    with any_database.read() as session:
        for question in questions:
            assert session.execute(text(question)).all() == []


def test_every_public_name_is_documented_with_its_parameters():
    text = (DOCS / "python.md").read_text()
    for name in farm.__all__:
        what = getattr(farm, name)
        if not inspect.isfunction(what):
            assert f"`{name}`" in text or f"`farm.{name}`" in text, name
            assert isinstance(what, str) or what.__doc__, name
            continue
        signature = inspect.signature(what)
        bare = [entry.replace(annotation=entry.empty) for entry in signature.parameters.values()]
        written = str(
            signature.replace(parameters=bare, return_annotation=signature.empty)
        ).replace("'", '"')
        assert f"| `{name}{written}` |" in text
        assert what.__doc__, name


#: The lines of a report that the README shows. A line `...` stands for others.
SHOWN = re.compile(
    r"resnet50|operator  |Conv2d|BatchNorm2d|sum | +sum|time  |power  |energy  |─|PASS"
)


@slow.MEASURED
def test_the_readme_shows_a_report_as_the_program_prints_it(request, monkeypatch):
    """`--regenerate-golden` writes the current report into the README."""
    monkeypatch.setenv("COLUMNS", "100")
    page = README.read_text()
    ((job, shown),) = re.findall(
        r"`farm report (\w+)` prints.*:\n\n```text\n(.*?)```", page, re.DOTALL
    )
    for command in (["import", "h100"], ["report", job]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    printed = excerpt(result.stdout)
    if request.config.getoption("--regenerate-golden"):
        README.write_text(page.replace(shown, printed))
        return
    assert shown == printed


def excerpt(report: str) -> str:
    """Return the lines of a report that the README shows."""
    lines = [line.rstrip() for line in report.splitlines()]
    result = []
    for shown, group in itertools.groupby(lines, key=lambda line: bool(SHOWN.match(line))):
        block = list(group)
        if shown:
            result += block
        else:
            result.append("" if block == [""] else "...")
    return "\n".join([*result, ""])


def test_the_readme_fits_on_one_screen():
    lines = README.read_text().splitlines()
    assert len(list(filter(None, lines))) <= 52
    assert max(map(len, lines)) <= 100


@slow.MEASURED
def test_the_commands_answer_the_questions_of_the_readme():
    (table,) = re.findall(
        r"^\| question \| command \|\n\| --- \| --- \|\n((?:\|.*\n)+)",
        README.read_text(),
        re.MULTILINE,
    )
    assert table.count("\n") == 5
    for command in re.findall(r"`farm (.+?)`", table):
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
        assert result.stdout.strip(), command


def packaged_verdicts(name: str) -> str:
    """Return the outcomes and gaps of all packaged verdicts of models on one card model, as cells of
    a table.
    """
    table = pq.read_table(DOCS.parent / "farm" / "data" / name / "verdicts.parquet")
    newest = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["round"]):
        if row["job_kind"] == "model":
            newest[row["job_id"]] = row

    outcomes = Counter(row["outcome"] for row in newest.values())
    cells = [f"{outcomes['pass']}, {outcomes['fail']}, {outcomes['none']}"]
    judged = [row for row in newest.values() if row["outcome"] != "none"]
    for column in ("time_us", "energy_mj"):
        known = [row for row in judged if row[f"sum_{column}"] and row[f"whole_{column}"]]
        gaps = [row[f"sum_{column}"] / row[f"whole_{column}"] - 1 for row in known]
        median = statistics.median(map(abs, gaps))
        cells.append(f"{median:.1%}, {max(gaps, key=abs):+.1%}".replace("%", " %"))
    return " | ".join(cells)


@pytest.mark.parametrize("name", ["h200", "h100"])
def test_the_readme_states_all_packaged_readings_and_verdicts(request, name):
    """`--regenerate-golden` writes the current figures into the README."""
    page = README.read_text()
    ((card, figures),) = re.findall(
        rf"^(\| NVIDIA {name.upper()}\b.*?, )(\d+ cards \| .*) \|$", page, re.MULTILINE
    )
    readings = DOCS.parent / "farm" / "data" / name / "readings.parquet"
    cards = pq.read_table(readings, columns=["card_id"]).column("card_id")
    current = f"{len(cards.unique())} cards | {len(cards):,} | {packaged_verdicts(name)}"
    if request.config.getoption("--regenerate-golden"):
        README.write_text(page.replace(card + figures, card + current))
        return
    assert figures == current


def test_the_page_of_results_states_all_packaged_verdicts(request):
    """`--regenerate-golden` writes the current tables."""
    if request.config.getoption("--regenerate-golden"):
        results_page.PAGE.write_text(results_page.page())
        return
    assert results_page.PAGE.read_text() == results_page.page()


def test_every_design_note_is_in_the_index_and_in_the_navigation():
    folder = DOCS / "design"
    index = (folder / "README.md").read_text()
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for path in folder.glob("*.md"):
        if path.name == "README.md":
            continue
        text = path.read_text()
        assert f"]({path.name}) | " in index
        assert f": design/{path.name}\n" in navigation
        for part in ("**Question.**", "**Choice.**", "**Evidence.**"):
            assert f"\n{part} " in text, f"{path.name} has no {part}"


GUIDES = [
    "own-models",
    "sweeps",
    "language-models",
    "quantized-models",
    "training",
    "memory",
    "prediction",
    "other-cards",
    "compare",
    "compare-revisions",
    "publish",
    "card-check",
    "operate",
]


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_has_its_parts_in_their_order_and_is_short(name):
    text = (DOCS / f"{name}.md").read_text()
    parts = [
        r"\nGoal: ",
        "\n## Command\n",
        "\n## Output\n",
        "\n## What it means\n",
        "\n## Limits\n",
    ]
    assert re.search(".*".join(parts), text, re.DOTALL)
    assert len(text.split()) <= (4000 if name == "operate" else 2000)


def test_the_method_is_short():
    assert len((DOCS / "method.md").read_text().split()) <= 4000


@pytest.mark.parametrize(
    "path", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda path: str(path.name)
)
def test_a_table_and_a_list_begin_after_an_empty_line(path):
    """Markdown on GitHub does not need this line, but that of the site does."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip().splitlines()
        for mark in ("| --- ", "| ---: "):
            assert not any(line.strip().startswith(mark) for line in lines[2:]), paragraph
        is_list = paragraph.lstrip().startswith(("- ", "1. ")) or paragraph.startswith(" ")
        assert is_list or not any(line.startswith("- ") for line in lines), paragraph


def test_the_pages_that_files_name_exist():
    root = DOCS.parent
    missing = {
        f"{path.relative_to(root)}: {name}"
        for folder in ("benchmarks", "cli", "examples", "farm", "tasks")
        for pattern in ("*.py", "*.toml", "*.yml")
        for path in (root / folder).rglob(pattern)
        for name in re.findall(r"docs/[\w/.-]+\.md\b", path.read_text())
        if not (root / name).is_file()
    }
    assert not missing


def test_the_architecture_page_lists_the_modules_of_every_room(request):
    """`--regenerate-golden` writes the current modules into the page."""
    page = DOCS / "architecture.md"
    table = page.read_text().partition("| room | subject | modules |\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    rooms = [f"farm/{room}" for room in ORDER if (DOCS.parent / "farm" / room).is_dir()]
    rooms += ["farm"] if _modules(DOCS.parent / "farm") else []
    assert [room for room, *_ in rows] == [f"`{room}/`" for room in ("cli", "tasks", *rooms)]
    current = [
        (room, subject, _modules(DOCS.parent / room.strip("`"))) for room, subject, _ in rows
    ]
    if request.config.getoption("--regenerate-golden"):
        new = "\n".join(f"| {' | '.join(row)} |" for row in current)
        page.write_text(page.read_text().replace(table.partition("\n")[2], new))
        return
    assert rows == [list(row) for row in current], "run with --regenerate-golden"


def test_the_functions_and_classes_of_the_way_of_a_command_exist():
    page = (DOCS / "architecture.md").read_text()
    way = page.partition("## What `farm run resnet18` does")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|", way, re.MULTILINE)
    assert len(rows) == way.count("\n| ") - 2  # without the heading
    missing = [name for path, name in rows if name not in _functions(ROOT / path)]
    files = [path for room in ("cli", "farm", "tasks") for path in (ROOT / room).rglob("*.py")]
    lines = "\n".join(path.read_text() for path in files)
    classes = re.findall(r"^class (\w+)", lines, re.MULTILINE)
    assert not [*missing, *set(re.findall(r"`([A-Z]\w+)`", way)).difference(classes)]


def _functions(path: Path) -> set[str]:
    """The functions of a file, and the methods of its classes as 'Class.method'."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
            names.update(f"{node.name}.{method.name}" for method in methods)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def _modules(room: Path) -> str:
    names = [file.stem for file in room.glob("*.py") if not file.stem.startswith("__")]
    if room.name != "farm":
        names += [
            f"{folder.name}/" for folder in room.iterdir() if (folder / "__init__.py").exists()
        ]
    return ", ".join(f"`{name}`" for name in sorted(names))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_in_which_order_to_read_it(room):
    """The names in backticks are modules of the room, or of another room with their full name."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert text, f"{room}/__init__.py has no docstring"
    names = re.findall(r"`([a-z][\w/]*)`", text)
    full_names = re.findall(r"`((?:farm|tasks|cli)(?:\.[a-z]\w*)+)`", text)
    modules = [f"{room}/{name.rstrip('/')}" for name in names]
    modules += [name.replace(".", "/") for name in full_names]
    missing = [name for name in modules if not _is_module(ROOT / name)]
    assert not missing


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_parser_accepts_the_example_of_every_command():
    for name, command in all_commands().items():
        words = with_joined_name(shlex.split(command.example.removeprefix("farm ")))
        words = with_compile_mode(words)
        assert words[0] == name
        with main.built(command).make_context(name, words[1:]):
            pass


def test_no_text_has_the_marks_of_an_unresolved_merge():
    marks = tuple(mark * 7 + " " for mark in "<>")
    for pattern in (
        "*.md",
        "*.toml",
        "*.txt",
        "*.yml",
        *(f"{room}/**/*.*" for room in ("docs", "cli", "farm", "tests")),
    ):
        for path in README.parent.glob(pattern):
            if path.suffix in (".md", ".toml", ".txt", ".yml", ".py", ".json", ".html"):
                assert not any(
                    line.startswith(marks) for line in path.read_text("utf-8").splitlines()
                ), path
