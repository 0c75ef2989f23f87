"""`~` in a setting means the home folder, as in the shell."""

import os
from pathlib import Path

import pytest

from farm.errors import SettingsError
from farm.settings import Settings, settings


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_every_path_of_the_settings_may_start_at_the_home_folder(tmp_path):
    home = Settings(
        state_dir=Path("~/state"),
        compiler_cache_dir=Path("~/compiler"),
        lock_dir=Path("~"),
        models={"tiny": "~/tiny", "net": "nets:net"},
        weights={"net": "~/net.safetensors"},
        libraries={"lib": "~/lib.json"},
        models_path=os.pathsep.join(("~/a", "/b", "c~")),
        database_url="sqlite:///~/farm.db",
    )
    assert home.state_dir == tmp_path / "state"
    assert home.compiler_cache_dir == tmp_path / "compiler"
    assert home.lock_dir == tmp_path
    assert home.models == {"tiny": f"{tmp_path}/tiny", "net": "nets:net"}
    assert home.weights == {"net": f"{tmp_path}/net.safetensors"}
    assert home.libraries == {"lib": f"{tmp_path}/lib.json"}
    assert home.models_path == os.pathsep.join((f"{tmp_path}/a", "/b", "c~"))
    assert home.database == f"sqlite:///{tmp_path}/farm.db"


@pytest.mark.parametrize("url", ["postgresql://farm:~a@host/~b", "sqlite:////srv/~farm.db"])
def test_other_urls_stay(url):
    assert Settings(database_url=url).database == url


def test_a_user_without_a_home_folder_is_a_wrong_setting(monkeypatch):
    monkeypatch.setenv("FARM_STATE_DIR", "~no-such-user/state")
    with pytest.raises(SettingsError, match="is wrong: there is no home folder for '~no-such-user"):
        settings()
