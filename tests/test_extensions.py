"""Add-ons come from entry points: those of the farm, and of distributions that the host names."""

import sys

import pytest

from farm import extensions
from farm.errors import SettingsError
from farm.extensions import add_ons, public_names
from farm.settings import settings
from tests.cli.conftest import farm  # noqa: F401

MODULE = """
from farm.types.add_on import AddOn, Command

ADD_ON = AddOn(
    "carbon",
    commands=(Command("carbon", "carbon_of_a_test:carbon", "farm carbon JOB"),),
    public={"carbon_of_a_test": "carbon"},
)


def carbon(job: str) -> None:
    '''Show the carbon of a job.'''
    print(f"{job}: 1 g")
"""


@pytest.fixture
def fresh():
    """Look for add-ons again in this test, and after it."""
    from cli import commands, main

    def clear():
        settings.cache_clear()
        extensions.add_ons.cache_clear()
        commands.all_commands.cache_clear()
        main.built.cache_clear()

    clear()
    yield clear
    clear()


@pytest.fixture
def other_distribution(tmp_path, monkeypatch):
    """An installed distribution with an add-on."""
    (tmp_path / "carbon_of_a_test.py").write_text(MODULE)
    information = tmp_path / "farm_carbon-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: farm-carbon\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[farm.addons]\ncarbon = carbon_of_a_test:ADD_ON\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "carbon_of_a_test", raising=False)


def test_the_farm_has_its_own_add_ons():
    assert set(add_ons()) == {"check", "memory", "pages", "predict"}
    assert public_names()["step_memory"] == "farm.addons.memory.queries"


def test_another_distribution_is_loaded_only_if_the_host_names_it(
    other_distribution, fresh, monkeypatch, farm
):
    assert "carbon" not in add_ons()
    unknown = farm("carbon", "job1").stderr.replace("\n  ", " ")
    assert "There is no command 'farm carbon'" in unknown
    assert "name the add-on in FARM_ADDONS: farm-carbon" in unknown
    assert "carbon_of_a_test" not in sys.modules
    misspelt = farm("reprot").stderr
    assert "Did you mean report" in misspelt
    assert "FARM_ADDONS" in misspelt
    monkeypatch.setenv("FARM_ADDONS", "farm-carbon")
    fresh()
    assert list(add_ons())[-1] == "carbon"
    assert "farm-carbon" not in extensions.unnamed_distributions()
    assert farm("carbon", "job1").stdout == "job1: 1 g\n"
    assert "Show the carbon of a job." in farm("--help").stdout


def test_a_distribution_without_an_add_on_is_a_wrong_setting(fresh, monkeypatch):
    monkeypatch.setenv("FARM_ADDONS", "no-such-distribution")
    fresh()
    with pytest.raises(SettingsError, match="'no-such-distribution' has no add-on"):
        add_ons()


@pytest.mark.parametrize(
    ("text", "message", "step"),
    [
        ("[carbn.job]", "section [carbn]", "Did you mean carbon? The names that exist: carbon."),
        ("[carbon.jobs]", "section [carbon.jobs]", "Did you mean job? The names that exist: job."),
        ("[carbon]\njob = 1", "section [carbon.job]", "The names that exist: job."),
        ("[carbon.job]\nflag = []", "an unknown key 'flag'", "Did you mean flags"),
        ("[carbon.job", "is not TOML", "Correct the file."),
    ],
)
def test_a_wrong_section_of_the_options_of_an_add_on_is_named(
    other_distribution, fresh, monkeypatch, farm, tmp_path, text, message, step
):
    (tmp_path / "options.toml").write_text(text)
    monkeypatch.setenv("FARM_ADDONS", "farm-carbon")
    fresh()
    said = farm("carbon", "job1")
    assert said.code == 2
    assert message in said.stderr
    assert step in said.stderr.replace("\n  ", " ")
    assert str(tmp_path / "options.toml") in said.stderr.replace("\n", "")
