"""Draw the pictures of the documentation from the packaged readings: ``python
docs/pictures/draw.py``.

matplotlib draws `sum-against-whole.svg`; the same data give the same file. Chromium, if installed,
makes screenshots of the pages in the light and the dark colour scheme."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sqlmodel import col, select

from farm.addons.pages import page as site
from farm.exchange.packaged import database_of, packaged_named
from farm.report.report import Report, build
from farm.store import tables
from farm.verdict.verdict import Comparison

HERE = Path(__file__).parent
CARD = "h200"
TARGET = 0.05  # largest gap at a target of 95 %
COLOURS = {"float32": "#2a6fbb", "bfloat16": "#c65d1e", "float16": "#4a8f3c"}
#: Name of the picture -> page of the site, width, height, dark.
PAGES = {
    "page-resnet18": ("model-resnet18.html", 1000, 1500, False),
    "page-resnet18-dark": ("model-resnet18.html", 1000, 1500, True),
}


def main() -> None:
    packaged = packaged_named(CARD)
    assert packaged is not None, f"the packaged readings of {CARD} are missing"
    with tempfile.TemporaryDirectory() as folder:
        database = database_of([packaged], Path(folder))
        with database.read() as session:
            jobs = session.exec(
                select(tables.Job.id).order_by(col(tables.Job.created_at_s), col(tables.Job.id))
            ).all()
            draw_sums([build(session, job) for job in jobs], HERE / "sum-against-whole.svg")
            site.publish(session, Path(folder) / "site")
        database.close()
        from tests.browser import BROWSER

        if BROWSER is None:
            sys.exit("Chromium is not installed: no screenshots of the pages.")
        for name, (page, width, height, dark) in PAGES.items():
            photograph(
                BROWSER,
                Path(folder) / "site" / page,
                HERE / f"{name}.png",
                width,
                height,
                dark=dark,
            )


def draw_sums(reports: Sequence[Report], path: Path) -> None:
    """Draw the sum and the whole model of each job, in time and in energy, and the gaps."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plt.rcParams.update({"svg.hashsalt": "farm", "font.size": 9, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(
        2,
        2,
        figsize=(8.6, 5.6),
        height_ratios=(2.2, 1),
        sharex="col",
        layout="constrained",
        facecolor="white",
    )
    for column, (name, unit) in enumerate((("time", "ms"), ("energy", "mJ"))):
        above, below = axes[0][column], axes[1][column]
        found = [
            (report, pair)
            for report in reports
            if (pair := _of(report, name)) and pair.whole and pair.gap
        ]
        scale = 1e-3 if name == "time" else 1.0
        values = [pair.whole.value * scale for _, pair in found if pair.whole]
        ends = [min(values) / 1.4, max(values) * 1.4]
        above.plot(ends, ends, color="#888888", linewidth=0.8, zorder=1)
        below.axhspan(-TARGET * 100, TARGET * 100, color="#eeeeee", zorder=0)
        below.axhline(0, color="#888888", linewidth=0.8, zorder=1)
        for dtype, colour in COLOURS.items():
            own = [pair for report, pair in found if report.request["variant"]["dtype"] == dtype]
            if not own:
                continue
            x = [pair.whole.value * scale for pair in own if pair.whole]
            y = [pair.total.value * scale for pair in own]
            y_error = [pair.total.half_width * scale for pair in own]
            gaps = [pair.gap for pair in own if pair.gap]
            style = {
                "fmt": "o",
                "markersize": 4.5,
                "color": colour,
                "elinewidth": 1.0,
                "capsize": 2,
                "zorder": 2,
            }
            above.errorbar(x, y, yerr=y_error, label=f"{dtype} ({len(own)})", **style)
            below.errorbar(
                x,
                [100 * gap.value for gap in gaps],
                yerr=[100 * gap.half_width for gap in gaps],
                **style,
            )
        above.set(
            xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel=f"sum of the parts ({unit})"
        )
        above.set_title(name, fontweight="bold")
        below.set(xlabel=f"whole model ({unit})", ylabel="gap (%)", ylim=(-9, 9))
        for axis in (above.xaxis, above.yaxis, below.xaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        for axes_ in (above, below):
            axes_.grid(alpha=0.3, linewidth=0.5)
            axes_.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, loc="upper left")
    cards = {card.model for report in reports for card in report.cards}
    figure.suptitle(
        f"Sum of the parts against the whole model, {len(reports)} jobs on "
        f"{', '.join(sorted(cards))}"
    )
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _of(report: Report, name: str) -> Comparison | None:
    found: Comparison | None = getattr(report.verdict, name)
    return found


def photograph(
    browser: str, page: Path, path: Path, width: int, height: int, *, dark: bool
) -> None:
    """Save the upper part of a page as a small PNG."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "page.png"
        subprocess.run(
            [
                browser,
                *(
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--hide-scrollbars",
                    "--no-first-run",
                ),
                *(
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--force-device-scale-factor=1.5",
                ),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},{height}",
                "--virtual-time-budget=10000",
                f"--screenshot={taken}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=180,
        )
        Image.open(taken).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    main()
