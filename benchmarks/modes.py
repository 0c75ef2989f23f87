"""List the files whose code knows a mode: a way to run a model that most code need not know.

    python benchmarks/modes.py             # the number of files that know each mode
    python benchmarks/modes.py compiled    # the files, with the names that show it

A file knows a mode if a name in its code or a text without blanks stands for the mode: `variant.generates_kernels` does not,
`variant.compile`, `CompiledStep` and `"compiled"` do. Comments, docstrings and messages do not count.
`docs/design/modes.md` says why each file knows it, and `tests/test_modes.py` checks that page.
"""

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("farm", "tasks", "cli")


def word(text: str) -> str:
    """A pattern of a word within a name in snake case."""
    return rf"(?<![a-z]){text}(?![a-z])"


#: Mode -> the pattern of its names, in snake case; an attribute has its owner: `variant.step`.
PATTERNS = {
    "compiled": r"(?<!\bre\.)(?<!torch\.)" + word("compil(?:e|ed|es|ing)"),
    "several cards": word("ranks?"),
    "placement": word("placements?"),
    "cpu": r'^"cpu"$|' + word("is_cpu"),
    "rough": word("rough"),
    "step": r"\bvariant\.step$|\bself\.step$|^is_step$|training_step",
}


def names_in(path: Path) -> Iterator[str]:
    """Yield the names in the code of a file; a text is in quotation marks."""
    tree = ast.parse(path.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case ast.ImportFrom(module=str(module)):
                yield module
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                yield f"{owner}.{name}"
            case ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in statements:
                if re.fullmatch(r"[\w-]+", text):
                    yield f'"{text}"'


def in_snake_case(name: str) -> str:
    """`CompiledStep` -> `compiled_step`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@functools.cache
def names_by_file() -> dict[str, frozenset[str]]:
    """Return file -> the names in its code."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): frozenset(names_in(path)) for path in paths}


def files_that_know(mode: str) -> dict[str, set[str]]:
    """Return file -> the names in it that stand for a mode."""
    pattern = re.compile(PATTERNS[mode])
    found = {}
    for file, names in names_by_file().items():
        names_of_mode = {name for name in names if pattern.search(in_snake_case(name))}
        if names_of_mode:
            found[file] = names_of_mode
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", nargs="?", choices=PATTERNS, help="list the files of this mode")
    mode = parser.parse_args().mode
    if mode is None:
        for name in PATTERNS:
            print(f"{name:15} {len(files_that_know(name)):3} files")
        return
    for file, names in files_that_know(mode).items():
        print(f"{file}  {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
