"""Variables of the environment that resemble a setting are named with it."""

from __future__ import annotations

import pytest

from farm.settings import Settings, misspelt_variables, settings
from tasks.doctor.host import host_checks


def test_a_misspelt_variable_is_named_with_the_nearest_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FARM_DATABSE_URL", "sqlite:////tmp/never.db")
    monkeypatch.setenv("FARM_DATABASE", "sqlite:////tmp/never.db")
    monkeypatch.setenv("FARM_OF_ANOTHER_PROGRAM", "1")
    assert misspelt_variables() == {
        "FARM_DATABASE": "FARM_DATABASE_URL",
        "FARM_DATABSE_URL": "FARM_DATABASE_URL",
    }
    named = [check for check in host_checks(settings()) if check.name == "settings"]
    assert [check.level for check in named] == ["warning", "warning"]
    assert "FARM_DATABASE_URL" in named[0].next_step


def test_settings_and_variables_of_the_farms_programs_are_not_misspelt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in Settings.model_fields:
        monkeypatch.setenv(f"FARM_{name.upper()}", "1")
    for name in ("FARM_CONFIG", "FARM_METRICS_BIND", "FARM_IMAGE", "FARM_WORKER_CARD"):
        monkeypatch.setenv(name, "1")
    assert not misspelt_variables()
