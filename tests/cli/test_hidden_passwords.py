"""Passwords in unclear, malformed and unusual URLs show in no command, error, traceback or log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from farm.errors import safe_text
from farm.settings import settings
from tasks import logs
from tasks.app import configure

PASSWORD = ("Zq7xA", "Zq7xB")  # the two halves; none may appear, also not alone

DATABASES = [
    "postgresql://farm:Zq7xA Zq7xB@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA\nZq7xB@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA;Zq7xB@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA@Zq7xB@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA/Zq7xB@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA?Zq7xB@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA:1/farm",
    "host=127.0.0.1 port=1 user=farm password=Zq7xA",
    "host=127.0.0.1 port=1 password='Zq7xA Zq7xB'",
    "postgresql://127.0.0.1:1/farm?password=Zq7xA",
    "postgresql://127.0.0.1:1/farm?password=Zq7xA@Zq7xB",
    "postgresql://127.0.0.1:1/farm?sslpassword=Zq7xA",
    "postgresql://127.0.0.1:1/farm?pasword=Zq7xA",
    "postgresql://127.0.0.1:1/farm?pwd=Zq7xA%20Zq7xB",
    "mysql://farm:Zq7xA@127.0.0.1:1/farm",
    "sqlite:////nonexistent/farm.db?pasword=Zq7xA",
    "sqlite:///farm:Zq7xA@127.0.0.1:1/farm",
    "farm;Zq7xA@127.0.0.1",
    "postgresql://farm;Zq7xA@127.0.0.1:1/farm",
    "postgresql://farm%3AZq7xA%40127.0.0.1:1/farm",
    "postgresql://127.0.0.1:1/farm&password=Zq7xA",
    "'postgresql://farm:Zq7xA@127.0.0.1:1/farm'",
    "Zq7xA",
]
BROKERS = [
    "redis://:Zq7xA Zq7xB@127.0.0.1:1/0",
    "redis://:Zq7xA\nZq7xB@127.0.0.1:1/0",
    "redis://:Zq7xA;Zq7xB@127.0.0.1:1/0",
    "redis://:Zq7xA/Zq7xB@127.0.0.1:1/0",
    "redis://Zq7xA@127.0.0.1:1/0",
    "redis:/:Zq7xA@127.0.0.1:1/0",
    "redis//Zq7xA@127.0.0.1:1/0",
    "http://farm:Zq7xA/Zq7xB@127.0.0.1:1/0",
    "host=127.0.0.1 password=Zq7xA",
    "redis://127.0.0.1:1/0?password=Zq7xA",
    "redis://127.0.0.1:1/0?pasword=Zq7xA",
    "rediss://127.0.0.1:1/0?ssl_password=Zq7xA",
    "redis+socket:///nonexistent/x.sock?sslpassword=Zq7xA",
    "farm;Zq7xA@127.0.0.1",
    "redis://farm;Zq7xA@127.0.0.1:1/0",
    "REDIS://Zq7xA@127.0.0.1:1/0",
    "redis://farm%3AZq7xA%40127.0.0.1:1/0",
]
#: Further typing errors; commands treat them as those above.
MORE = [
    "farm:Zq7xA@127.0.0.1:1/farm",
    "//farm:Zq7xA@127.0.0.1:1/farm",
    "postgresql:farm:Zq7xA@127.0.0.1:1/farm",
    "postgresql//farm:Zq7xA@127.0.0.1:1/farm",
    "postgresql:///farm:Zq7xA@127.0.0.1:1/farm",
    "postgresql://farm,Zq7xA@127.0.0.1:1/farm",
    "postgresql://farm=Zq7xA@127.0.0.1:1/farm",
    "postgresql://farm%3AZq7xA@127.0.0.1:1/farm",
    "postgresql://farm:Zq7xA%40127.0.0.1:1/farm",
    "postgresql://127.0.0.1:1/farm%3Fpassword%3DZq7xA",
    "postgresql://127.0.0.1:1/farm;password=Zq7xA",
    "postgresql://127.0.0.1:1/farm#Zq7xA",
    "postgresql://farm:Zq7xA@127.0.0.1:1/farm\n",
    "redis://farm%3AZq7xA@127.0.0.1:1/0",
    "redis://127.0.0.1:1/0&password=Zq7xA",
    "redis://127.0.0.1:1/0#Zq7xA",
    "valkey://Zq7xA@127.0.0.1:1/0",
    "':Zq7xA@127.0.0.1:1'",
]
URLS = [
    *(("FARM_DATABASE_URL", url) for url in DATABASES),
    *(("FARM_BROKER_URL", url) for url in BROKERS),
]


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch):
    monkeypatch.setattr(safe_text, "_secrets", set())
    safe_text._pattern_of_secrets.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()
    configure(settings())  # the application must not keep a URL of these tests
    safe_text._pattern_of_secrets.cache_clear()


@pytest.mark.parametrize(("variable", "url"), URLS)
def test_no_command_shows_a_password(farm, monkeypatch, variable, url):
    monkeypatch.setenv(variable, url)
    settings.cache_clear()
    configure(settings())
    for command in (
        "settings",
        "settings --json",
        "doctor",
        "--debug jobs",
        "--debug submit resnet18",
    ):
        said = farm(*command.split())
        shown = said.stdout + said.stderr
        assert not any(half in shown for half in PASSWORD), command
        assert "This is a bug" not in shown, command
        if said.code and command != "doctor":
            assert "error: " in said.stderr
            assert "→ " in said.stderr


@pytest.mark.parametrize(
    ("variable", "url", "command"),
    [
        ("FARM_DATABASE_URL", "postgresql://127.0.0.1:1/farm?pasword=Zq7xA", "jobs"),
        ("FARM_DATABASE_URL", "sqlite:////nonexistent/farm.db?pasword=Zq7xA", "jobs"),
        ("FARM_BROKER_URL", "redis://127.0.0.1:1/0?pasword=Zq7xA", "submit resnet18"),
    ],
)
def test_an_unknown_option_is_an_error_of_the_url(farm, monkeypatch, variable, url, command):
    monkeypatch.setenv(variable, url)
    settings.cache_clear()
    said = farm(*command.split())
    assert said.code == 2
    message, step = said.stderr.splitlines()
    assert "has an option after '?'" in message
    assert variable in step


@pytest.mark.parametrize("formatter", [logs.PlainLines, logs.JsonLines])
@pytest.mark.parametrize(
    ("variable", "url"), [*URLS, *(("FARM_DATABASE_URL", url) for url in MORE)]
)
def test_a_log_shows_no_password(monkeypatch, variable, url, formatter):
    monkeypatch.setenv(variable, url)
    settings.cache_clear()
    settings()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter())
    try:
        raise ValueError(f"cannot use {url!r} or {url}, port {url.partition('Zq')[1]}7xA")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "", 0, "Failed with %s", (error,), sys.exc_info()
        )
    handler.handle(record)
    assert "Failed with" in stream.getvalue()
    assert not any(half in stream.getvalue() for half in PASSWORD)


@pytest.mark.parametrize("url", MORE)
def test_the_settings_show_no_password(farm, monkeypatch, url):
    for variable in ("FARM_DATABASE_URL", "FARM_BROKER_URL"):
        monkeypatch.setenv(variable, url)
    settings.cache_clear()
    said = farm("settings")
    assert (said.code, "Zq7xA" in said.stdout + said.stderr) == (0, False)


def test_a_misspelt_setting_shows_no_value(farm, monkeypatch, tmp_path):
    file = tmp_path / "farm.toml"
    file.write_text('database_ulr = "postgresql://farm:Zq7xA@h/farm"\n')
    monkeypatch.setenv("FARM_CONFIG", str(file))
    settings.cache_clear()
    said = farm("--debug", "settings")
    assert "database_ulr" in said.stderr
    assert "Zq7xA" not in said.stdout + said.stderr
