"""The data files of the Celery application: names that Celery knows, and all files are in the
package.
"""

import fnmatch
import tomllib
from pathlib import Path

from celery.app.defaults import DEFAULTS

import tasks
from tasks.app import app, broker_unreachable

FOLDER = Path(tasks.__file__).parent


def test_celery_knows_every_setting_and_uses_its_value():
    chosen = tomllib.loads((FOLDER / "celery.toml").read_text())
    assert set(chosen) <= set(DEFAULTS)
    assert {name: app.conf[name] for name in chosen} == chosen


def test_the_package_contains_the_data_files():
    declared = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    files = [
        path.name
        for path in FOLDER.iterdir()
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert files
    assert all(
        any(fnmatch.fnmatch(name, pattern) for pattern in declared["tasks"]) for name in files
    )


def test_a_port_for_tls_that_ends_the_connection_is_named():
    ended = ConnectionError(
        "Error while reading from broker:6390 : (104, 'Connection reset by peer')"
    )
    assert "rediss://" in broker_unreachable("redis://broker:6390/0", ended).next_step
    assert "rediss://" not in broker_unreachable("rediss://broker:6390/0", ended).next_step
    refused = ConnectionError("Error 111 connecting to broker:6390. Connection refused.")
    assert "rediss://" not in broker_unreachable("redis://broker:6390/0", refused).next_step
