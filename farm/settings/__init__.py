"""All settings of the farm, read once from the environment (``FARM_*``) and an optional TOML file.

``docs/settings.md`` describes each setting; a test compares names and defaults.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from farm.errors import SettingsError, UsageError, did_you_mean
from farm.errors.safe_text import keep_secret

#: systemd creates this folder at every boot (deploy/systemd/farm.tmpfiles), for services,
#: containers and users.
SERVICE_LOCK_DIR = Path("/run/farm-card-locks")

#: The longest start of a benchmark process: importing torch from a cold network disk takes minutes.
#: Unit: s.
START_TIMEOUT_S = 180.0

MOST_NAME_BYTES = 255  # of a name in a path, on all usual file systems
MOST_PATH_BYTES = 3500  # of a folder, so that the files in it have names of at most 4,096 bytes
MOST_CONFIG_BYTES = 1 << 20  # of the settings file

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

#: Variables of the farm's programs and of `deploy/` that are no settings.
NO_SETTINGS = frozenset({"FARM_CONFIG", "FARM_IMAGE", "FARM_METRICS_BIND"})
LEAST_LIKENESS = 0.8  # of a misspelt name and a setting, by `difflib`

#: Settings whose empty text means that they are not set.
_NEVER_EMPTY = {"state_dir", "compiler_cache_dir", "lock_dir", "host"}
#: Error of pydantic for a variable of the environment that must be JSON.
_NO_JSON = re.compile(r'error parsing value for field "(\w+)"')
NEXT_STEP = "Correct the setting; docs/settings.md describes all settings."


def _lock_dir() -> Path:
    # One folder for the whole host, so that the workers of all users use the same locks. It ignores
    # TMPDIR. Mount it into containers.
    if SERVICE_LOCK_DIR.is_dir():
        return SERVICE_LOCK_DIR
    temporary = Path("/tmp")
    return (temporary if temporary.is_dir() else Path(tempfile.gettempdir())) / "farm-card-locks"


def _with_home(path: str) -> str:
    """Replace ``~`` or ``~user`` at the start of a path, as the shell does: in a setting, no shell
    has done it. Raises ValueError if the user has no home folder."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        raise ValueError(f"there is no home folder for '{path}'") from None


class Settings(BaseSettings):
    """The settings (docs/settings.md). Environment variables override the file named by
    ``FARM_CONFIG``.
    """

    model_config = SettingsConfigDict(env_prefix="FARM_", extra="forbid", hide_input_in_errors=True)

    # of Redis or Valkey. "": no farm is configured; `farm run` starts its own broker
    broker_url: str = ""
    database_url: str = ""  # "": SQLite in `state_dir`
    state_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("farm")))
    # PyTorch loads the compiler's cache as code: no other user may write to its folder.
    compiler_cache_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_cache_dir("farm")) / "compiler"
    )
    # beyond it, the oldest files are removed at the start of a compilation
    compiler_cache_gib: float = Field(8, ge=0)
    # that compile models ahead of their turn on this host, together; 0: none
    compile_processes: int = Field(default=0, ge=0)
    # of the cards' locks, shared by all workers of the host
    lock_dir: Path = Field(default_factory=_lock_dir)
    host: str = Field(default_factory=socket.gethostname)  # must be unique in the farm
    host_id: str = ""  # for the id of the CPU card. "": derived from the host name and machine id
    # name -> 'module:function', or a folder with a config.json
    models: dict[str, str] = Field(default_factory=dict)
    # folders with the modules of `models`, searched after all that is installed
    models_path: str = ""
    # name of a model of the user -> 'module:function'
    losses: dict[str, str] = Field(default_factory=dict)
    # name of a model of the user -> a file of safetensors
    weights: dict[str, str] = Field(default_factory=dict)
    # library with operators of its own -> the file of their list; "": a list of the farm
    libraries: dict[str, str] = Field(default_factory=dict)
    addons: str = ""  # distributions whose add-ons this host also loads, separated by commas
    lease_s: float = Field(60.0, gt=0)  # a claim on an item holds so long without renewal
    # to measure an item, and as long again to verify a whole model
    item_timeout_s: float = Field(300.0, gt=0)
    # the processes of a group wait so long for the next item on their cards
    group_idle_s: float = Field(60.0, ge=0)
    # then Celery kills a card's task process; 0: enough for all attempts
    hard_limit_s: float = Field(0.0, ge=0)
    # then the broker repeats an open item's message; 0: 4 hard limits
    visibility_timeout_s: float = Field(0.0, ge=0)
    max_attempts: int = Field(3, ge=1)  # an item is begun so often before it is closed as failed
    # interval in which leases and a card's last-seen time are renewed
    heartbeat_s: float = Field(5.0, gt=0)
    # interval in which a control worker looks for work that the broker lost
    reconcile_s: float = Field(5.0, gt=0)
    # a worker that takes no waiting item for so long restarts; 0: never
    deaf_after_s: float = Field(300.0, ge=0)
    # a worker's GPUs are checked so often (`farm worker --check-every`); 0: never
    check_every_s: float = Field(0.0, ge=0)
    check_quarantine: bool = False  # whether a card that such a check finds outside is quarantined
    # whether a command measures on a GPU of this host on which other processes compute
    allow_shared: bool = False
    target: float = Field(0.95, gt=0, le=1)  # accuracy and coverage that a verdict needs to pass
    flower_port: int = Field(5555, ge=0, le=65535)
    flower_basic_auth: str = ""  # user:password. "": none, and loopback only
    # on which a host's control worker answers Prometheus; 0: off
    metrics_port: int = Field(0, ge=0, le=65535)
    metrics_address: str = "127.0.0.1"
    # to test the farm without torch: readings are marked and never reused
    simulated_cards: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _keep_secrets(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in ("broker_url", "database_url", "flower_basic_auth"):
            if isinstance(value := given.get(name), str) and value:
                keep_secret(value)
        return given

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Use the default in place of an empty folder or host, as of a variable of the shell that
        is not set: an empty folder would be the current one.
        """
        return {name: value for name, value in values.items() if value or name not in _NEVER_EMPTY}

    @field_validator("state_dir", "compiler_cache_dir", "lock_dir")
    @classmethod
    def _check_home_of_folder(cls, path: Path) -> Path:
        return Path(_with_home(str(path)))

    @field_validator("models", "weights", "libraries")
    @classmethod
    def _check_home_of_each(cls, paths: dict[str, str]) -> dict[str, str]:
        return {name: _with_home(path) for name, path in paths.items()}

    @field_validator("models_path")
    @classmethod
    def _check_home_of_path(cls, paths: str) -> str:
        return os.pathsep.join(map(_with_home, paths.split(os.pathsep)))

    @field_validator("database_url")
    @classmethod
    def _check_home_of_database(cls, url: str) -> str:
        scheme, separator, path = url.partition(":///")
        return scheme + separator + _with_home(path)

    @field_validator("state_dir", "compiler_cache_dir", "lock_dir")
    @classmethod
    def _check_names(cls, path: Path) -> Path:
        """Refuse a path that no file can have: everything that opens a file in it would fail."""
        lengths = [len(os.fsencode(part)) for part in path.parts]
        if max(lengths, default=0) > MOST_NAME_BYTES or sum(lengths) > MOST_PATH_BYTES:
            raise ValueError(
                f"a name may have at most {MOST_NAME_BYTES} bytes, and a path {MOST_PATH_BYTES:,}"
            )
        return path

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Any,
        env_settings: Any,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        used: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        if path := os.environ.get("FARM_CONFIG"):
            try:
                if not Path(path).is_file():
                    message = f"FARM_CONFIG names '{path}', which is not a file."
                    raise SettingsError(message, "Correct or unset FARM_CONFIG.")
                if Path(path).stat().st_size > MOST_CONFIG_BYTES:
                    message = (
                        f"FARM_CONFIG names '{path}', which is larger than {MOST_CONFIG_BYTES} "
                        "bytes."
                    )
                    raise SettingsError(message, "Correct or unset FARM_CONFIG.")
                used += (TomlConfigSettingsSource(settings_cls, path),)
            except OSError as error:
                raise SettingsError(
                    f"FARM_CONFIG names '{path}', which cannot be read: {error.strerror}.",
                    "The file holds passwords: use an account of the farm's group "
                    "(docs/operate.md, Secrets).",
                ) from error
        return used

    @property
    def database(self) -> str:
        """The URL of the database that this process uses."""
        return self.database_url or f"sqlite:///{self.state_dir / 'farm.db'}"

    @property
    def beat_s(self) -> float:
        """The interval in which leases are renewed: a lease lasts for at least three of them."""
        return min(self.heartbeat_s, self.lease_s / 3)

    @property
    def cpu_card_id(self) -> str:
        """A stable id for this host's CPU, the counterpart of a GPU's UUID."""
        if self.host_id:
            return f"CPU-{self.host_id}"
        return f"CPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{self.host}.{_machine_id()}')}"


def _machine_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return Path(path).read_text().strip()
    return f"{uuid.getnode():x}"


@functools.cache
def settings() -> Settings:
    """The settings of this process. Raises `SettingsError`, which names the setting, if one has a
    wrong value or is unknown."""
    try:
        return Settings()
    except ValueError as error:
        raise _explained(error) from error


class UserModels:
    """The user's models on this host, and the folders with their modules: those of the settings,
    and those that a person named by their location in this process. Also the token ids of the
    user's texts, because a variant has only their content id.

    Only the models of the second kind are stored here. A process that this one starts knows both
    (`environment_of_children`). It gets the token ids with each request."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._folders: list[str] = []
        self._weights: dict[str, str] = {}
        # `farm.types.tokens.Tokens`, of a room above this one
        self._texts: dict[str, Any] = {}

    def add(self, name: str, target: str, folder: str = "") -> None:
        """Register a model. ``target``: 'module:function', or a folder with a config.json;
        ``folder``: that of its module."""
        self._targets[name] = target
        self._folders.append(folder)

    def add_weights(self, name: str, file: str) -> None:
        """Register the file with the weights of a model."""
        self._weights[name] = file

    def add_text(self, id_: str, tokens: Any) -> None:
        """Store the token ids of a text under their content id."""
        self._texts[id_] = tokens

    def forget(self) -> None:
        """Remove the models and weights that are not in the settings."""
        self._targets.clear()
        self._folders.clear()
        self._weights.clear()

    def forget_texts(self) -> None:
        """Remove the token ids of all texts. A long-lived process does so before each request,
        which contains its own."""
        self._texts.clear()

    def has_text(self, id_: str) -> bool:
        return id_ in self._texts

    def text(self, id_: str) -> Any:
        """Return the token ids with a content id. Raises `UsageError` if this process has not
        stored them."""
        if id_ not in self._texts:
            step = "Give the text again, with --text and --tokenizer."
            raise UsageError(
                f"The token ids of the text {id_} are not stored here; exports do not contain "
                "them.",
                step,
            )
        return self._texts[id_]

    def targets(self) -> dict[str, str]:
        """Name -> 'module:function', or a folder with a config.json."""
        return {**settings().models, **self._targets}

    def folders(self) -> list[str]:
        """The folders with the user's modules, in the order in which Python searches them."""
        paths = [*settings().models_path.split(os.pathsep), *self._folders]
        return list(dict.fromkeys(filter(None, paths)))

    def weights(self) -> dict[str, str]:
        """Name -> the file with the weights of the model."""
        return {**settings().weights, **self._weights}

    def environment(self) -> dict[str, str]:
        """The variables with which another process knows the same models; {} if its settings are
        enough.
        """
        variables = {}
        if self._targets:
            variables["FARM_MODELS"] = json.dumps(self.targets())
            variables["FARM_MODELS_PATH"] = os.pathsep.join(self.folders())
        if self._weights:
            variables["FARM_WEIGHTS"] = json.dumps(self.weights())
        return variables


user_models = UserModels()


def settings_but_wrong_ones() -> tuple[Settings, list[str]]:
    """Return the settings, with defaults for wrong values, and one message for each wrong value.
    Raises `SettingsError` if the settings cannot be read, or a setting is unknown."""
    try:
        return Settings(), []
    except ValueError as error:
        wrong = (
            error.errors(include_url=False, include_input=False)
            if isinstance(error, ValidationError)
            else []
        )
        fields, names = Settings.model_fields, {str(problem["loc"][0]) for problem in wrong}
        if not names or not names <= fields.keys():
            raise _explained(error) from error
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in names}
        return Settings(**defaults), [_problem(problem) for problem in wrong]


def misspelt_variables() -> dict[str, str]:
    """Variables of the environment that begin with ``FARM_`` and are no settings -> the setting
    that they resemble. Variables that resemble none may belong to another program.

    Example: {"FARM_DATABSE_URL": "FARM_DATABASE_URL"}.
    """
    settings_names = [f"FARM_{name.upper()}" for name in Settings.model_fields]
    others = (
        {name for name in os.environ if name.startswith("FARM_")}
        - set(settings_names)
        - NO_SETTINGS
    )
    misspelt = {}
    for name in sorted(others):
        near = difflib.get_close_matches(name, settings_names, n=1, cutoff=LEAST_LIKENESS)
        if near:
            misspelt[name] = near[0]
    return misspelt


def die_with_parent(signum: int = signal.SIGKILL, parent: int = 0) -> None:
    """Let the kernel send ``signum`` to this process when its parent ends (Linux; elsewhere the
    parent must stop it). If ``parent``, the pid of the expected parent (0: any), has already ended,
    this process exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent and os.getppid() != parent:
        os._exit(0)


def environment_of_children(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a Python process that the farm starts: this process's environment
    with `user_models` and `changes`.

    That process and its children (such as Celery's and Python's worker pools) import only installed
    packages and packages on PYTHONPATH. Otherwise Python would search the current folder first, and
    run a file ``tasks.py`` or ``torch.py`` there instead of the real module."""
    environment = {**os.environ, **user_models.environment(), **(changes or {})}
    environment["PYTHONSAFEPATH"] = "1"
    # An empty entry means the current folder. It is the result of appending to an unset variable.
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    # An installed package is found anyway, and site-packages must not come before the standard
    # library.
    if _PACKAGE_ROOT.name not in ("site-packages", "dist-packages"):
        paths.append(str(_PACKAGE_ROOT))
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def _explained(error: ValueError) -> SettingsError:
    if isinstance(error, ValidationError):
        return SettingsError(
            _problem(error.errors(include_url=False, include_input=False)[0]), NEXT_STEP
        )
    no_json = _NO_JSON.search(str(error))
    if no_json:
        name = no_json[1]
        return SettingsError(f"The setting '{name}' (FARM_{name.upper()}) is no JSON.", NEXT_STEP)
    file = os.environ.get("FARM_CONFIG", "")
    return SettingsError(f"FARM_CONFIG names '{file}', which is not TOML: {error}.", NEXT_STEP)


def _problem(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = did_you_mean(name, Settings.model_fields)
        return f"'{name}' is not a setting. {near}".rstrip()
    return (
        f"The setting '{name}' (FARM_{name.partition('.')[0].upper()}) is wrong: "
        f"{problem['msg'].removeprefix('Value error, ')}."
    )
