"""The site of the docs works in a folder, without a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import browser, slow

ROOT = Path(__file__).parents[1]
SEARCHED = """<script>
setTimeout(() => document.getElementById("__search").click(), 500);
setTimeout(() => {
  const query = document.querySelector("input[name=query]");
  query.focus();
  query.value = "roofline";
  query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
}, 1500);
</script>"""


@slow.PROCESS
@pytest.mark.skipif(not browser.BROWSER, reason="no Chromium here")
def test_the_search_finds_pages_in_a_local_folder(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    page = tmp_path / "site" / "index.html"
    page.write_text(page.read_text().replace("</body>", f"{SEARCHED}</body>"))
    document, console = browser.opened(page, tmp_path / "profile")
    assert console == []
    assert re.search(r"\d+ matching documents", document)
