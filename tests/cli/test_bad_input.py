"""Bad input: one clear message, the next step, the fitting exit code and no traceback; nothing is
begun.
"""

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farm import errors
from farm.errors import FarmError, SettingsError
from farm.settings import Settings, settings
from farm.store import tables
from tests.report import rows

ROOT = Path(__file__).parent.parent.parent
UNAVAILABLE = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message", "next_step"),
    [
        (
            "run",
            2,
            "There is nothing to measure: no model and no file is given.",
            "farm run resnet18",
        ),
        ("run --bach 3", 2, "There is no option '--bach'.", "Did you mean --batch"),
        (
            "run --nonsense",
            2,
            "There is no option '--nonsense'.",
            "`farm run -h` describes its arguments and options.",
        ),
        ("run -b", 2, "-b needs a value.", "`farm run -h`"),
        (
            "--nonsense",
            2,
            "There is no option '--nonsense'.",
            "`farm -h` describes its arguments and options.",
        ),
        ("rnu", 2, "There is no command 'farm rnu'.", "Did you mean run"),
        ("nonsense", 2, "There is no command 'farm nonsense'.", "`farm -h` lists the commands."),
        ("db upgarde", 2, "There is no command 'farm db upgarde'.", "Did you mean upgrade?"),
        ("report", 2, "Give either the ids of jobs, or --trace READING.", "`farm jobs`"),
        ("cancel", 2, "JOB is missing.", "`farm cancel -h`"),
        (
            "settings more",
            2,
            "`farm settings` does not take the argument 'more'.",
            "`farm settings -h`",
        ),
        ("run resnet81", 2, "There is no model named 'resnet81'.", "resnet18"),
        ("run resnet18 --compile foo", 2, "no model named 'foo'", "modes of --compile are default"),
        ("run --compile foo resnet18", 2, "no model named 'foo'", "modes of --compile are default"),
        ("operators resnet18 --compile foo", 2, "the argument 'foo'", "--compile are default and"),
        ("run --compile resnet81", 2, "no model named 'resnet81'", "resnet18"),
        ("run resnet8*", 2, "No model name matches 'resnet8*'.", "farm models"),
        ("run gpt2 --layers 99", 2, "gpt2 has 12 layers, not 99.", "--layers 12 or less"),
        ("run gpt2 --layers 0", 2, "--layers is 0; it must be at least 1.", "Omit --layers"),
        (
            "run gpt2 --phase decode --cache 0",
            2,
            "--cache is 0; it must be at least 1.",
            "Omit --cache",
        ),
        ("run resnet18 --layers 2", 2, "resnet18 cannot be cut to 2 layers.", "Omit --layers"),
        ("run fasterrcnn_resnet50_fpn", 2, "is a detection model", "farm models"),
        ("run resnet18 -b 0", 2, "batch is 0", "-b 1"),
        ("run resnet18 -b two", 2, "--batch 'two' is not a size.", "--batch 1,8,32"),
        (
            "run resnet18 --window soon",
            2,
            "--window needs a number, with or without a unit (1%, 60s), not 'soon'.",
            "farm run -h",
        ),
        ("jobs -n 0", 2, "--limit needs a number from 1 to 2147483647, not '0'.", "farm jobs -h"),
        (
            "jobs -n 99999999999999999999",
            2,
            "--limit needs a number from 1 to 2147483647, not",
            "farm jobs -h",
        ),
        ("run resnet18 -b 99999999999999999999999", 2, "it must be from 1 to 2147483647.", "-b 1"),
        ("operators resnet18 -b 2147483648", 2, "it must be from 1 to 2147483647.", "-b 1"),
        (
            "run resnet18 --window inf",
            2,
            "maximum_s is inf; it must be above 0 and finite.",
            "--window 3",
        ),
        (
            "run resnet18 --window nan",
            2,
            "maximum_s is nan; it must be above 0 and finite.",
            "--window 3",
        ),
        ("run resnet18 --dtype int3", 2, "dtype 'int3' is unknown", "float32, float16, bfloat16"),
        (
            "run resnet18 --memory-format odd",
            2,
            "memory format 'odd' is unknown",
            "contiguous, channels_last",
        ),
        ("run vit_b_16 --input-size 160", 2, "vit_b_16 takes images of 224 px only", "224"),
        ("run inception_v3 --input-size 50", 2, "from 75", "299"),
        ("run bert-base --text none.txt", 2, "--text needs --tokenizer", "Give both"),
        (
            "run bert-base --text none.txt --tokenizer t",
            2,
            "The text none.txt does not exist",
            "the path of a file",
        ),
        (
            "operators resnet18 --text t --tokenizer t",
            2,
            "resnet18 takes no tokens and no text",
            "--tokenizer.",
        ),
        ("estimate bert-base --tokenizer t", 2, "--tokenizer needs --text", "Give both"),
        ("run resnet18 --operators Conv2", 2, "There is no operator named 'Conv2'", "Did you mean"),
        ("run resnet18 --operators all,Conv2d", 2, "mixes 'all' with names", "Conv2d,Linear"),
        ("run resnet18 --operators ,", 2, "--operators has no names", "Conv2d,Linear"),
        ("run gpt2 --quantize none,,int8", 2, "has an empty name", "one comma each"),
        ("compare a b --fail-above x", 2, "--fail-above requires a percentage", "--fail-above 5%"),
        ("predict evaluate --predictor roofline", 2, "no option '--predictor'", "describes its"),
        ("run resnet18 --target 3", 2, "The target is 3.0", "--target 0.95"),
        (
            "run resnet18 --reuse maybe",
            2,
            "reuse 'maybe' is unknown",
            "model, card, imported, none",
        ),
        ("run resnet18 --launch graph --card cpu", 2, "no CUDA graphs", "--launch eager"),
        ("run resnet18 --residency hot", 2, "residency 'hot' is unknown", "resident"),
        ("run resnet18 --window 0", 2, "maximum_s is 0.0", "--window 3"),
        (
            "run resnet18 -b 2147483647 --card cpu",
            2,
            "its inputs take 1,293,025.7 GB",
            "a smaller batch",
        ),
        ("run resnet18 --card h100", 2, "No card matches 'h100'", "The cards are: "),
        ("run -f none.yml", 2, "none.yml: No such file", "docs/measurement-files.md"),
        ("submit resnet18", 3, "No broker is configured.", "farm run"),
        ("submit resnet18 --check", 2, "--check needs the verdicts", "--wait"),
        ("worker", 3, "No broker is configured.", "FARM_BROKER_URL"),
        ("flower", 3, "No broker is configured.", "FARM_BROKER_URL"),
        ("status", 3, "does not exist yet", "farm run"),
        ("report abc", 3, "does not exist yet", "farm run"),
        ("db check", 3, "does not exist yet", "farm db upgrade"),
        ("models nothinglikeit", 2, "There is no model named", "farm models"),
        ("operators resnet5", 2, "There is no model named 'resnet5'", "resnet50"),
        ("operators resnet18 --dtype fp4", 2, "dtype 'fp4' is unknown", "bfloat16"),
    ],
)
def test_is_answered_with_what_was_wrong_and_what_to_do(farm, arguments, code, message, next_step):
    said = farm(*arguments.split())
    assert (said.code, said.stdout) == (code, "")
    first, second = said.stderr.strip().splitlines()[-2:]
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("→ ")
    assert next_step in second
    assert "Traceback" not in said.stderr


#: Errors that are answers, or that the farm itself handles.
WITHOUT_STEP = {"TupleRejected", "BelowTarget", "CardUnavailable", "Unmeasurable", "HostBusy"}


def test_every_error_has_a_next_step():
    shown = {name for name, error in vars(errors).items() if _is_error(error)} - WITHOUT_STEP
    without = []
    for folder in ("farm", "cli", "tasks"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                if node.func.id in shown and len(node.args) == 1 and not node.keywords:
                    without.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert without == []


def _is_error(value):
    return isinstance(value, type) and issubclass(value, FarmError)


def test_a_mistake_in_a_file_is_named_by_file_line_and_key(farm, tmp_path):
    path = tmp_path / "jobs.yml"
    path.write_text("measurements:\n  - model: resnet18\n    batsh: 3\n")
    said = farm("run", "-f", path)
    assert said.code == 2
    assert f"{path}:3: measurements[0].batsh is unknown." in said.stderr
    assert "→ Did you mean batch?" in said.stderr

    path.write_text("- model: resnet18\n- model: resnet81\n")
    stderr = farm("run", "-f", path).stderr
    assert f"{path}:2: entries[1].model: " in stderr
    assert "no model named 'resnet81'" in stderr

    # Only with the card does it show that the entry is impossible; its line is named even so.
    path.write_text("- model: resnet18\n  protocol: {launch: graph}\n")
    assert f"{path}:1: A CPU has no CUDA graphs" in farm("run", "-f", path, "--card", "cpu").stderr


@pytest.mark.parametrize("verb", ["doctor", "worker", "flower", "settings"])
def test_a_settings_file_of_somebody_else_is_named(tmp_path, verb):
    config = tmp_path / "farm.toml"
    config.write_text("target = 0.9\n")
    config.chmod(0)
    command = [sys.executable, "-m", "cli", verb]
    if os.geteuid() == 0:  # who reads whatever there is, unless the right is taken away
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv, to be root without root's rights")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    said = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "FARM_CONFIG": str(config)},
        capture_output=True,
        text=True,
    )
    *_, first, second = (
        said.stderr.strip().splitlines()
    )  # a note of progress may precede them on a busy host
    assert (said.returncode, said.stdout) == (2, "")
    assert first.startswith(f"error: FARM_CONFIG names '{config}'")
    assert first.endswith(": Permission denied.")
    assert "use an account of the farm's group" in second


def test_a_huge_settings_file_is_not_read(tmp_path, monkeypatch):
    with (tmp_path / "farm.toml").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setenv("FARM_CONFIG", str(tmp_path / "farm.toml"))
    settings.cache_clear()
    with pytest.raises(SettingsError, match=r"farm\.toml', which is larger than 1048576 bytes"):
        settings()


def test_a_broker_that_does_not_answer_is_named_without_its_password(farm, monkeypatch):
    monkeypatch.setenv("FARM_BROKER_URL", "redis://:secret@127.0.0.1:1/0")
    settings.cache_clear()
    for command in ("submit resnet18", "worker", "flower"):
        said = farm(*command.split())
        assert said.code == 3
        assert "127.0.0.1:1" in said.stderr
        assert "secret" not in said.stderr


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://127.0.0.1:1/farm?user=farm&password=secret",
        "postgresql://farm:a@secret@127.0.0.1:1/farm",
        "postgresql://farm:secret@127.0.0.1:port/farm",
    ],
)
def test_settings_and_doctor_show_no_password_of_the_database(farm, monkeypatch, url):
    monkeypatch.setenv("FARM_DATABASE_URL", url)
    monkeypatch.setenv("FARM_BROKER_URL", "redis://:a@secret@127.0.0.1:1/0")
    settings.cache_clear()
    for command in ("settings", "settings --json", "doctor --json", "jobs"):
        told = farm(*command.split())
        assert "secret" not in told.stdout + told.stderr
        assert "fault in farm" not in told.stderr


def test_a_database_that_does_not_answer_is_named(farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", "postgresql://user:secret@127.0.0.1:1/farm")
    settings.cache_clear()
    said = farm("jobs")
    assert said.code == 3
    assert "does not answer" in said.stderr
    assert "secret" not in said.stderr


def test_a_broker_of_another_kind_is_refused(farm, monkeypatch):
    monkeypatch.setenv("FARM_BROKER_URL", "amqp://user:secret@host//")
    settings.cache_clear()
    said = farm("submit", "resnet18")
    assert said.code == 2
    assert "The broker URL 'amqp://" in said.stderr
    assert "secret" not in said.stderr


def test_a_file_that_is_no_database_is_named(farm, monkeypatch, tmp_path):
    (tmp_path / "notes.db").write_text("hello" * 300)
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{tmp_path / 'notes.db'}")
    settings.cache_clear()
    said = farm("jobs")
    assert said.code == 3
    assert "notes.db cannot be read" in said.stderr


def test_a_wrong_setting_is_named(farm, monkeypatch):
    monkeypatch.setenv("FARM_TARGET", "7")
    settings.cache_clear()
    said = farm("settings")
    assert said.code == 2
    assert "FARM_TARGET" in said.stderr
    assert "docs/settings.md" in said.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = ", "farm.toml', which is not TOML: Invalid value"),
        ("host = 'é'".encode("latin-1"), "farm.toml', which is not TOML: 'utf-8' codec"),
        ("databse_url = ''", "'databse_url' is not a setting. Did you mean database_url?"),
        ("models = {x = 3}", "The setting 'models.x' (FARM_MODELS) is wrong"),
    ],
)
def test_a_settings_file_with_a_mistake_is_named(farm, monkeypatch, tmp_path, text, message):
    config = tmp_path / "farm.toml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("FARM_CONFIG", str(config))
    settings.cache_clear()
    said = farm("jobs")
    assert said.code == 2
    assert message in said.stderr
    assert "docs/settings.md" in said.stderr


def test_a_variable_that_must_be_json_is_named(farm, monkeypatch):
    monkeypatch.setenv("FARM_MODELS", "{")
    settings.cache_clear()
    assert "The setting 'models' (FARM_MODELS) is no JSON." in farm("jobs").stderr


def test_an_empty_folder_is_the_default_and_not_the_current_one(monkeypatch):
    names = ("state_dir", "compiler_cache_dir", "lock_dir", "host")
    for name in names:
        monkeypatch.delenv(f"FARM_{name.upper()}", raising=False)
    default = Settings()
    for name in names:
        monkeypatch.setenv(f"FARM_{name.upper()}", "")
    assert Settings() == default


@pytest.mark.parametrize("verb", ["cancel", "status", "report", "resume"])
@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_no_job_not_even_the_only_one(farm, monkeypatch, database, verb, name):
    job_id = rows.model_job(database)
    with database.write() as session:
        session.get_one(tables.Job, job_id).state = "open"
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    said = farm(verb, name)
    assert (said.code, said.stdout) == (2, "")
    assert "error: The id of a job is empty" in said.stderr
    assert "farm jobs" in said.stderr
    with database.read() as session:
        assert session.get_one(tables.Job, job_id).state == "open"


def test_debug_shows_the_traceback(farm):
    assert "Traceback" in farm("--debug", "run", "resnet81").stderr


def test_a_refused_run_leaves_nothing_behind(farm):
    farm("run", "resnet18", "-b", "0")
    assert not os.path.exists(settings().state_dir)


def test_a_worker_that_is_gone_is_named_with_the_cards_that_are_there(
    farm, monkeypatch, broker, database
):
    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    monkeypatch.setenv("FARM_DATABASE_URL", str(database.url))
    settings.cache_clear()
    from tasks.app import configure

    configure(settings())
    said = farm("submit", "resnet18")
    assert said.code == 3
    assert "This farm has no running worker" in said.stderr
    with database.write() as session:
        session.add(
            tables.CardRow(
                id="GPU-1", kind="cuda", model="NVIDIA H200", state="stopped", host="far"
            )
        )
    said = farm("submit", "resnet18", "--card", "h200")
    assert said.code == 3
    assert "card 'h200': NVIDIA H200 (GPU-1) is stopped" in said.stderr
    with database.write() as session:
        session.get_one(tables.CardRow, "GPU-1").state = "draining"
    said = farm("submit", "resnet18")
    assert said.code == 3
    assert "no new items: NVIDIA H200 (GPU-1)" in said.stderr
    assert "farm cards resume GPU-1" in said.stderr


def test_ctrl_c_while_modules_load_ends_it_without_a_word(tmp_path):
    # In typer's place, a module that interrupts the process which imports it.
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "runpy.run_module('cli', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
