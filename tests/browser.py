"""Headless Chromium, for tests of pages in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def opened(page: Path, folder: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """Return the page's document after its scripts have run, and the console messages."""
    run = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={folder}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000", "--dump-dom"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return run.stdout, re.findall(r'CONSOLE.*?"(.*)", source', run.stderr)
