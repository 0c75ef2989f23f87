"""The notebook of the docs runs on a CPU, and what it shows is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import slow

DOCS = Path(__file__).parent.parent.parent / "docs"

#: Runs the cells in order, and shows the last value of each as a notebook would.
RUN = """
import ast, json, sys
shown, names = [], {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] != "code":
        continue
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last is not None:
        shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names)._repr_html_())
json.dump(shown, open(sys.argv[2], "w"))
"""


@slow.PROCESS
def test_the_notebook_runs_on_a_cpu_and_shows_itself(tmp_path: Path) -> None:
    shown = tmp_path / "shown.json"
    command = [sys.executable, "-c", RUN, str(DOCS / "notebook.ipynb"), str(shown)]
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    captured, reading, frame, report = json.loads(shown.read_text())
    assert "Classifier-" in captured
    assert "gelu" in captured
    assert "Linear" in reading
    assert "time_half_width_us" in frame
    assert "sum of the parts" in report
