"""Verbs that measure nothing."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from sqlmodel import select
from typer.main import get_command

from cli import follow, main, output
from cli.commands import all_commands
from cli.options import CliOptions
from cli.tables import sparkline
from farm.addons.predict.commands import Readings
from farm.addons.predict.estimate_command import EstimateOptions
from farm.devices.device import Card
from farm.extensions import at
from farm.jobs import cards, jobs
from farm.jobs.plan import JobPlan, PlanState
from farm.settings import settings
from farm.store import tables
from farm.types.reading import Trace
from tasks import app
from tasks.submissions import Submissions
from tests.planned import register
from tests.report import rows


def test_version_and_help(farm):
    assert farm("--version").stdout.startswith("farm ")
    assert "farm run resnet18" in farm("--help").stdout


@pytest.mark.parametrize("command", ["operators alexnet -b 1", "memory alexnet -b 1"])
def test_a_command_that_takes_long_says_what_it_does(farm, monkeypatch, command):
    monkeypatch.setattr(output, "PATIENCE_S", 0.0)
    assert f"farm {command.split()[0]} is working ..." in farm(*command.split()).stderr
    assert "is working" not in farm("-q", *command.split()).stderr


def test_a_curve_says_at_which_size_it_is(farm, monkeypatch):
    said = []
    monkeypatch.setattr(output, "doing", said.append)
    farm("estimate", "resnet18", "-b", "1,32", "--card", "H200")
    assert [text for text in said if "resnet18" in text] == [
        "farm is estimating resnet18 1x224 float32",
        "farm is estimating resnet18 32x224 float32",
    ]


def test_models_lists_by_part_of_a_name_and_by_pattern(farm):
    everything = json.loads(farm("models", "--json").stdout)["models"]
    assert len([model for model in everything if model["task"] == "classification"]) == 80
    assert {
        model["name"] for model in json.loads(farm("models", "vit_l_*", "--json").stdout)["models"]
    } == {
        "vit_l_16",
        "vit_l_32",
    }
    (one,) = json.loads(farm("models", "resnet18", "--json").stdout)["models"]
    assert (one["parameters"], one["flops"] > 3e9) == (11_689_512, True)
    said = farm("models", "RESN")
    assert "resnext50_32x4d" in said.stdout
    assert "25.6 M" in said.stdout
    assert "The setting `models` adds your own models" in said.stderr


def test_operators_extracts_a_model_without_a_farm(farm):
    said = farm("operators", "resnet18", "-b", "4", "--json")
    assert said.code == 0, said.stderr
    listed = json.loads(said.stdout)
    assert (listed["calls"], listed["tuples"]) == (68, 28)
    assert listed["flops"] == listed["model_flops"]
    assert sum(row["estimated_cost_share"] for row in listed["operators"]) == pytest.approx(1)
    assert not settings().state_dir.exists()
    assert (
        "Conv2d 3->64 k7 s2 p3 | 4x3x224x224 fp32"
        in farm("operators", "resnet18", "-b", "4").stdout
    )


def test_operators_takes_the_batch_that_a_job_would_get(farm, database, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "4x224 float32 (the default batch on a CPU)" in farm("operators", "resnet18").stdout
    assert "default batch" not in farm("operators", "resnet18", "-b", "4").stdout
    # A host without a GPU, of a farm that has one.
    monkeypatch.setenv("FARM_BROKER_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    assert json.loads(farm("operators", "resnet18", "--json").stdout)["variant"]["batch"] == 4
    with database.write() as session:
        session.add(tables.CardRow(id="GPU-1", kind="cuda", model="NVIDIA H200"))
    assert "32x224 float32 (the default batch on a GPU)" in farm("operators", "resnet18").stdout


@pytest.mark.parametrize(
    ("name", "meant"), [("resnet?8", ["resnet18"]), ("ViT_L_*", ["vit_l_16", "vit_l_32"])]
)
def test_a_pattern_means_every_model_that_fits(name, meant):
    assert [partial.model for partial in CliOptions(models=[name, "resnet18"]).requests()] == list(
        dict.fromkeys([*meant, "resnet18"])
    )


def test_a_dry_run_says_what_it_would_measure_and_begins_nothing(farm, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = farm("run", "alexnet", "squeezenet1_?", "--dry-run")
    assert said.code == 0, said.stderr
    first, *_, last = said.stdout.splitlines()
    assert first.startswith("alexnet 4x224 float32 on 1 card (")
    assert "to measure, 0 measured already; " in first
    assert "Nothing was started (--dry-run)." in last
    foreseen = json.loads(farm("run", "alexnet", "--dry-run", "--json").stdout)
    assert foreseen["jobs"][0]["items_new"] == foreseen["jobs"][0]["tuples"] + 1, (
        "the tuples and the whole"
    )
    assert foreseen["expected_s"] == foreseen["jobs"][0]["expected_s"] > 0
    assert not settings().state_dir.exists()


def test_the_database_is_made_and_checked(farm):
    assert farm("db", "check").code == 3
    assert "(was empty)" in farm("db", "upgrade").stdout
    assert "already" in farm("db", "upgrade").stdout
    assert farm("db", "check").code == 0


def test_a_dry_run_of_submit_plans_for_the_farms_cards_and_makes_no_job(
    farm, database, broker, monkeypatch
):
    (card,) = register(database, 0)
    with database.write() as session:
        session.get_one(tables.CardRow, card).state = "idle"
    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    app.configure(settings())
    said = farm("submit", "alexnet", "--dry-run", "--check")
    assert said.code == 0, said.stderr
    assert said.stdout.startswith("alexnet 32x224 float32 on 1 card (a card): ")
    with database.read() as session:
        assert session.exec(select(tables.Job)).all() == []


def test_what_is_pruned_is_said_first_and_asked_for(farm, database, monkeypatch):
    job_id = rows.model_job(database)
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        more = {"id": "empty", "state": "cancelled", "created_at_s": 1.0, "ended_at_s": 1.0}
        session.add(tables.Job(**{**job.model_dump(), **more}))
        session.add(
            tables.TraceRow(
                reading_id=session.exec(select(tables.ReadingRow.id)).first(), packed=b"12345678"
            )
        )
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    what = "1 time series of readings (8 B) and 1 job without a reading"
    assert what in farm("db", "prune", "--dry-run").stdout
    refused = farm("db", "prune")
    assert (refused.code, refused.stdout) == (2, "")
    assert f"error: This would delete {what}.\n→ Add --yes" in refused.stderr
    assert f"{what} deleted." in farm("db", "prune", "--yes").stdout
    assert "0 time series of readings (0 B) and 0 jobs" in farm("db", "prune").stdout
    with database.read() as session:
        assert session.exec(select(tables.Job.id)).all() == [job_id]


def test_quiet_leaves_results_and_errors(farm):
    farm("db", "upgrade")
    assert farm("status").stderr
    assert farm("--quiet", "status").stderr == ""
    assert farm("-q", "jobs").stdout
    assert farm("-q", "report", "nothing").stderr.startswith(
        "error: There is no job 'nothing'.\n→ "
    )
    assert farm("status").stderr


@pytest.mark.parametrize("command", ["models resnet18", "--help", "doctor"])
def test_no_color_is_honoured(command):
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "CUDA_VISIBLE_DEVICES": "",
    }
    colour = re.compile(r"\x1b\[[0-9;]*(3[0-7]|38;)")

    def said(**more):
        done = subprocess.run(
            [sys.executable, "-m", "cli", *command.split()],
            env=environment | more,
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    assert not colour.search(said(NO_COLOR="1"))


def test_empty_lists_say_what_to_do(farm):
    farm("db", "upgrade")
    assert "farm run resnet18" in farm("jobs").stdout
    assert "farm run resnet18" in farm("status").stderr
    assert json.loads(farm("status", "--json").stdout) == {"jobs": []}


def test_significant_operators_are_shown_and_edited(farm):
    farm("db", "upgrade")
    assert farm("db", "significant", "--add", "Conv2d", "--add", "Linear").code == 0
    assert farm("db", "significant", "--add", "Conv2d").code == 0
    shown = json.loads(farm("db", "significant", "--json").stdout)["significant"]
    assert shown == [
        {"operator": "Conv2d", "added_by": "person"},
        {"operator": "Linear", "added_by": "person"},
    ]
    wrong = farm("db", "significant", "--remove", "Linaer")
    assert wrong.code == 2
    assert "Did you mean Linear?" in wrong.stderr
    assert farm("db", "significant", "--remove", "Linear").code == 0
    assert farm("db", "significant").stdout == "Conv2d  (added by a person)\n"
    assert farm("db", "significant", "--add", "Conv2").code == 2


def test_settings_are_shown_with_their_source_and_without_secrets(farm, monkeypatch, tmp_path):
    config = tmp_path / "farm.toml"
    config.write_text('flower_basic_auth = "me:hidden"\n')
    monkeypatch.setenv("FARM_CONFIG", str(config))
    monkeypatch.setenv("FARM_BROKER_URL", "redis://user:hidden@broker:6379/0")
    settings.cache_clear()
    said = farm("settings", "--json")
    rows = {row["setting"]: row for row in json.loads(said.stdout)["settings"]}
    assert "hidden" not in said.stdout
    assert rows["broker_url"] == {
        "setting": "broker_url",
        "variable": "FARM_BROKER_URL",
        "value": "redis://user:***@broker:6379/0",
        "source": "environment",
    }
    assert (rows["flower_basic_auth"]["value"], rows["flower_basic_auth"]["source"]) == (
        "***",
        "file",
    )
    assert rows["target"]["source"] == "default"
    assert "hidden" not in farm("settings").stdout


def test_local_cards_ask_no_database(farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "3")
    settings.cache_clear()
    local = json.loads(farm("cards", "--local", "--json").stdout)["cards"]
    assert len(local) == 3
    # Without --local the farm's cards are missing, and that is said; this host's are there all the
    # same.
    said = farm("cards", "--json")
    assert json.loads(said.stdout)["cards"] == local
    assert "only the cards of this host" in said.stderr


def test_flower_is_not_opened_to_the_network_without_a_password(farm, monkeypatch, broker):
    from tasks.app import configure

    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    settings.cache_clear()
    configure(settings())
    said = farm("flower", "--address", "0.0.0.0")
    assert said.code == 2
    assert "open to everyone" in said.stderr


def test_a_trace_is_drawn_with_its_window(farm, database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    times = [0.1 * step for step in range(11)]
    trace = Trace((0.3, 1.0), {"power_w": (times, [100.0 + step for step in range(11)])})
    with database.write() as session:
        session.add(tables.CardRow(id="GPU-1", kind="cuda", model="NVIDIA H200"))
        session.add(tables.SoftwareRow(id="s", torch="2"))
        session.add(tables.ProtocolRow(id="p", launch="graph", residency="resident", data="normal"))
        session.flush()
        session.add(
            tables.ReadingRow(
                id="abc1",
                subject_kind="operator",
                subject_id="x",
                card_id="GPU-1",
                card_model="NVIDIA H200",
                software_id="s",
                protocol_id="p",
                time_us=1,
                time_half_width_us=0,
                time_median_us=1,
                time_trimmed_us=1,
                passes=1,
                window_s=0.7,
                warm_up_s=0.3,
            )
        )
        session.flush()
        session.add(tables.TraceRow(reading_id="abc1", packed=trace.pack()))
    said = farm("report", "--trace", "abc")
    assert said.code == 0, said.stderr
    assert "window from 0.300 to 1.000 s" in said.stdout
    assert "100 to 110" in said.stdout
    assert (
        json.loads(farm("report", "--trace", "abc", "--json").stdout)["series"]["power_w"][
            "values"
        ][0]
        == 100.0
    )
    assert farm("report", "--trace", "zzz").code == 2
    with database.write() as session:
        session.delete(session.get_one(tables.TraceRow, "abc1"))
    said = farm("report", "--trace", "abc", "--png", "no such folder/a.png")
    assert said.code == 2
    assert "no time series" in said.stderr, "there is nothing to draw, wherever to"


def test_a_sparkline_rises_with_its_values_and_dots_what_is_outside_the_window():
    line = sparkline([0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 6.0, 7.0], (1.0, 3.0), width=6)
    assert line[:2] == "··"
    assert line[-1] == "█"
    assert list(line[2:]) == sorted(line[2:])
    assert sparkline([], [], (0, 1)) == ""


@pytest.mark.parametrize(
    "command", ["models", "models --json", "settings", "db upgrade", "doctor", "--version"]
)
def test_an_output_that_cannot_be_written_is_said_to_be_so(command):
    done = subprocess.run(
        f"{sys.executable} -m cli {command} > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "fault in farm" not in done.stderr
    assert "Traceback" not in done.stderr


def test_to_leave_what_one_watches_is_no_error(farm, database, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    rows.model_job(database)
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    monkeypatch.setattr(follow, "follow", interrupted)
    said = farm("status", "job1", "--watch")
    assert (said.code, said.stderr) == (130, "")


def test_the_end_of_watching_names_every_job(farm, database, monkeypatch):
    rows.model_job(database)
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    monkeypatch.setattr(follow, "follow", lambda *_, **__: None)
    assert "`farm report job1` shows the result." in farm("status", "job1", "--watch").stderr
    assert (
        "`farm report job1`, `farm report job1` show" in farm("status", "job1", "job1", "-w").stderr
    )


@pytest.mark.parametrize("how", [["--watch"], ["--watch", "--json"]])
def test_watching_a_run_that_was_killed_ends(farm, database, monkeypatch, how):
    rows.model_job(database)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with database.write() as session:
        job = session.get_one(tables.Job, "job1")
        job.state, job.farm = "open", cards.farm_name(settings().host, ended.pid, "ab")
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    said = farm("status", "job1", *how)
    assert said.code == 0
    assert jobs.ABANDONED in (said.stdout if "--json" in how else said.stderr)
    assert "shows the result" not in said.stderr
    if "--json" in how:
        assert json.loads(said.stdout)["jobs"][0]["abandoned"] is True


def test_submit_says_how_to_follow_every_job_and_what_was_left_out(farm, monkeypatch):
    def made(outcome, _database, _planned, **_):
        outcome.submitted += [
            JobPlan(PlanState.OPENED, name, 1, (), "a CPU", tuples=1, new=1, reused=0)
            for name in ("abc", "def")
        ]
        outcome.refused += [{"title": "ghi", "reason": "it has no operators"}]

    for module, name, instead in (
        (app, "check_broker", lambda _: None),
        (output, "open_database", lambda: None),
        (cards, "serving_cards", lambda *_: [Card("CPU-1", "cpu", "a CPU", 1)]),
        (Submissions, "still_to_do", lambda *_: []),
        (Submissions, "submit_all", made),
    ):
        monkeypatch.setattr(module, name, instead)
    said = farm("submit", "resnet18", "squeezenet1_1")
    assert said.code == 1
    assert "`farm status abc def --watch`" in said.stderr
    assert "error: 1 of 3 requests cannot be measured:\n  ghi:" in said.stderr
    said = farm("submit", "resnet18", "squeezenet1_1", "--json")
    assert json.loads(said.stdout)["refused"] == [{"title": "ghi", "reason": "it has no operators"}]


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m cli -q models | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_every_option_has_a_text_and_every_text_an_option():
    commands = [at(command.place) for command in all_commands().values()]
    functions = [
        one.callback for app in commands for one in getattr(app, "registered_commands", ())
    ]
    functions += [one for one in commands if inspect.isfunction(one)]
    known = {one.__name__.rstrip("_"): set(inspect.signature(one).parameters) for one in functions}
    known |= {
        group.__name__: {one.name for one in fields(group)}
        for group in (CliOptions, EstimateOptions, Readings)
    }
    root = Path(main.__file__).parents[1]
    files = [root / "cli/options.toml", *root.glob("farm/addons/*/options.toml")]
    texts = {
        owner: found for file in files for owner, found in tomllib.loads(file.read_text()).items()
    }
    assert [
        (owner, name)
        for owner, found in texts.items()
        for name in found
        if name not in known[owner]
    ] == []

    def parameters(command):
        for one in getattr(command, "commands", {}).values():
            yield from parameters(one)
        yield from () if hasattr(command, "commands") else command.params

    assert [one.name for one in parameters(get_command(main.app)) if not one.help] == []
