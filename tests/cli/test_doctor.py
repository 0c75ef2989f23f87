"""``farm doctor`` finds what is wrong and says what to do about it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pynvml
import pytest
from sqlalchemy import update

from farm import settings as farm_settings
from farm.devices.device import Card
from farm.devices.host import discover
from farm.devices.lock import CardLock
from farm.devices.software import Installed, installed_torch
from farm.jobs import cards
from farm.settings import Settings, settings
from farm.store import tables
from farm.types.software import Software
from tasks import embedded
from tasks.doctor import broker, drivers
from tasks.doctor import database as database_examined
from tasks.doctor import host as host_examined
from tasks.doctor.drivers import torch_against_driver
from tests.devices.fake_nvml import OTHER_UUID, UUID, behind_pynvml
from tests.planned import plan, register


def levels(checks, name):
    return [(check["level"], check["message"]) for check in checks if check["name"] == name]


def test_a_host_without_a_farm_is_fine(farm):
    said = farm("doctor")
    assert said.code == 0, said.stdout
    assert "0 problems" in said.stdout
    assert "`farm run` starts its own" in said.stdout


def test_what_does_not_answer_is_a_problem_with_a_next_step_and_without_its_password(
    farm, monkeypatch
):
    monkeypatch.setenv("FARM_BROKER_URL", "redis://:verysecret@127.0.0.1:1/0")
    monkeypatch.setenv("FARM_DATABASE_URL", "postgresql://a:verysecret@127.0.0.1:1/x")
    settings.cache_clear()
    from tasks.app import configure

    configure(settings())
    for arguments in (("doctor",), ("doctor", "--json")):
        said = farm(*arguments)
        assert said.code == 1
        assert "verysecret" not in said.stdout + said.stderr
    broken = {
        check["name"]: check
        for check in json.loads(said.stdout)["checks"]
        if check["level"] == "problem"
    }
    assert set(broken) == {"broker", "database"}
    assert all(check["next_step"] for check in broken.values())


@pytest.mark.parametrize(
    "url",
    [
        "http://x",
        "redis://:very/secret@127.0.0.1:6379/0",
        "redis://[::1/0",
        "redis://127.0.0.1:1/first",
        "rediss://127.0.0.1:1/0?ssl_cert_reqs=perhaps",
    ],
)
def test_a_broker_url_that_is_wrong_is_one_problem_and_the_rest_is_examined(
    examined, monkeypatch, url
):
    from tasks.app import configure

    monkeypatch.setenv("FARM_BROKER_URL", url)
    settings.cache_clear()
    configure(settings())
    checks = examined()
    ((level, told),) = levels(checks, "broker")
    assert level == "problem"
    assert "The broker URL" in told
    assert "very" not in told
    assert {"state folder", "lock folder", "driver"} <= {check["name"] for check in checks}


def test_wrong_settings_are_problems_and_the_rest_is_examined(examined, monkeypatch):
    monkeypatch.setenv("FARM_HEARTBEAT_S", "-1")
    monkeypatch.setenv("FARM_TARGET", "much")
    checks = examined()
    assert [
        "FARM_HEARTBEAT_S" in told or "FARM_TARGET" in told
        for _, told in levels(checks, "settings")
    ] == [True] * 2
    assert {"state folder", "lock folder", "driver"} <= {check["name"] for check in checks}


def test_an_empty_database_is_to_be_upgraded(examined, any_database_url, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", any_database_url)
    checks = examined()
    (found,) = [check for check in checks if check["level"] == "problem"]
    assert "farm db upgrade" in found["next_step"]


def test_the_cards_of_the_farm_are_judged(examined, any_database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", any_database.url.render_as_string(hide_password=False))
    for number, (host, torch) in enumerate(
        [("gpu1", "2.11.0"), ("gpu2", "2.12.0"), ("gpu3", "2.12.0")]
    ):
        card = Card(id=f"GPU-{number}", kind="cuda", model="NVIDIA H200", memory_bytes=1, host=host)
        cards.register(
            any_database, card, Software(torch=torch, driver="580"), holder=f"h{number}", queue="q"
        )
    cards.quarantine(any_database, "GPU-2", "a known sum came out wrong")
    checks = examined()
    assert levels(checks, "schema")[0][0] == "ok"
    assert levels(checks, "clock")[0][0] == "ok"
    assert levels(checks, "cards") == [("ok", "workers serve 2 cards on 2 hosts")]
    ((level, message),) = levels(checks, "card gpu3:0")
    assert level == "problem"
    assert "GPU-2 is quarantined: " in message
    ((level, told),) = levels(checks, "versions")
    assert level == "warning"
    assert "gpu1: torch 2.11.0" in told
    assert "driver" not in told


def test_a_card_that_takes_nothing_while_its_items_wait_is_a_problem(
    examined, database, monkeypatch
):
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string(hide_password=False))
    register(database, 0)
    plan(database, ["SIM-0"], number=2)
    with database.write() as session:
        session.execute(update(tables.Item).values(published_at_s=time.time() - 100))
    (found,) = [check for check in examined() if check["name"] == "card here:0"]
    assert found["level"] == "problem"
    assert re.search(r"no item for 1\d\d s, though 2 items wait", found["message"])
    assert "FARM_DEAF_AFTER_S" in found["next_step"]


def test_cards_that_get_ready_do_not_serve_yet(examined, any_database, monkeypatch, broker):
    from tasks.app import configure

    monkeypatch.setenv("FARM_DATABASE_URL", any_database.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    settings.cache_clear()
    configure(settings())
    for number in range(2):
        card = Card(
            id=f"GPU-{number}", kind="cuda", model="NVIDIA H200", memory_bytes=1, host="gpu1"
        )
        cards.announce(any_database, card.id, card, holder=f"h{number}", queue="q")
    assert levels(examined(), "cards") == [
        ("warning", "no worker is ready yet; 2 workers starting")
    ]
    cards.register(
        any_database, card, Software(torch="2.11.0", driver="580"), holder="h1", queue="q"
    )
    assert levels(examined(), "cards") == [
        ("ok", "workers serve 1 card on 1 host; 1 more starting")
    ]


@pytest.mark.parametrize("host", ["this", "another"])
def test_a_run_that_was_killed_is_no_worker_to_look_after(
    examined, any_database, monkeypatch, host
):
    monkeypatch.setenv("FARM_DATABASE_URL", any_database.url.render_as_string(hide_password=False))
    ended = subprocess.Popen(["true"])
    ended.wait()
    farm = cards.farm_name(settings().host if host == "this" else host, ended.pid, "ab")
    card = Card(id="GPU-1", kind="cuda", model="NVIDIA H200", memory_bytes=1, host=host)
    holder = cards.holder_name("GPU-1", host, 7, "ab", farm)
    cards.register(
        any_database, card, Software(torch="2.11.0", driver="580"), holder=holder, queue="q"
    )
    if host == "another":  # its end shows only when it is seen no more
        with any_database.write() as session:
            session.get_one(tables.CardRow, "GPU-1").last_seen_at_s -= 3600
    checks = examined()
    (found,) = [check for check in checks if check["name"] == f"card {host}:0"]
    step = "Run the same command again: it continues where it stopped."
    assert (found["level"], found["next_step"]) == ("warning", step)
    assert "`farm run`" in found["message"]
    assert levels(checks, "cards") == []


@pytest.mark.parametrize(
    ("url", "level"),
    [
        ("rediss://:p@far:6379/0?ssl_cert_reqs=required", "ok"),
        ("rediss://:p@far:6379/0?ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs=/a", "ok"),
        ("rediss://:p@far:6379/0", "ok"),
        ("rediss://:p@far:6379/0?ssl_cert_reqs=none", "warning"),
        ("rediss://:p@far:6379/0?ssl_cert_reqs=CERT_NONE", "warning"),
        ("rediss://:p@far:6379/0?ssl_ca_certs=/a&ssl_cert_reqs=CERT_OPTIONAL", "warning"),
        ("rediss://:p@far:6379/0?ssl_cert_reqs=optional", "warning"),
        ("rediss://:p@far:6379/0?ssl_cert_reqs=required&ssl_check_hostname=False", "warning"),
        ("redis://:p@far:6379/0?ssl_cert_reqs=required", "warning"),
        ("redis://127.0.0.1:6379/0", "ok"),
    ],
)
def test_a_far_broker_is_reached_with_a_checked_certificate(url, level):
    check = broker._transport(url)
    assert check.level == level, check.message
    assert ("its certificate is not checked" in check.message) == (level == "warning")


def test_versions_that_the_database_does_not_tell_are_compared_between_the_workers():
    here = {"farm": "0.1.0", "Python": "3.11.2", "torch": "2.11.0", "torchvision": "0.26.0"}
    without_torch = {"farm": "0.1.0", "Python": "3.11.2"}
    same = broker.programs(
        {"this host": without_torch, "control@gpu1": here, "card-GPU-1@gpu1": here}
    )
    assert same.level == "ok"
    other = {**here, "torchvision": "0.25.0", "farm": "0.2.0"}
    found = broker.programs(
        {"this host": without_torch, "control@gpu1": here, "control@gpu2": other}
    )
    assert found.level == "warning"
    assert "gpu1: farm 0.1.0 torchvision 0.26.0" in found.message
    assert "gpu2: farm 0.2.0 torchvision 0.25.0" in found.message
    assert "Python" not in found.message


def test_a_busy_cpu_is_told_unless_a_measurement_is_what_it_is_busy_with(examined, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(host_examined.os, "getloadavg", lambda: (cores, 0.0, 0.0))
    assert [level for level, _ in levels(examined(), "load")] == ["ok"]
    monkeypatch.setattr(host_examined.os, "getloadavg", lambda: (cores + 0.1, 0.0, 0.0))
    ((level, told),) = levels(examined(), "load")
    assert level == "warning"
    assert "unreliable" in told
    with CardLock(settings().cpu_card_id, settings().lock_dir):
        assert levels(examined(), "load") == []


def test_a_run_says_what_would_make_its_readings_worthless_before_it_begins(farm, monkeypatch):
    def not_begun():
        raise KeyboardInterrupt

    monkeypatch.setattr(host_examined.os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    monkeypatch.setattr(embedded, "BrokerServer", not_begun)
    said = farm("run", "alexnet", "--card", "cpu", "-b", "1").stderr
    assert "warning: load average 999.0" in said
    assert said.index("warning:") < said.index("Starting workers")
    monkeypatch.setattr(host_examined.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert "warning" not in farm("run", "alexnet", "--card", "cpu", "-b", "1").stderr


def test_gpus_that_are_hidden_are_told(examined, monkeypatch):
    with behind_pynvml(monkeypatch) as library:
        library.uuids = [UUID, OTHER_UUID]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ((level, message),) = levels(examined(), "GPUs")
        assert level == "ok"
        assert "all 2 GPUs" in message
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        ((level, told),) = levels(examined(), "GPUs")
        assert level == "warning"
        used = "the farm sees 1 of the 2 GPUs that the driver lists"
        assert told.startswith(f"{used}; CUDA_VISIBLE_DEVICES=0 leaves out 1")


def test_a_clock_that_is_off_is_told(examined, postgres_url, monkeypatch):
    from farm.store.database import Database

    database = Database(postgres_url)
    database.upgrade()
    database.close()
    monkeypatch.setenv("FARM_DATABASE_URL", postgres_url)
    real = time.time
    monkeypatch.setattr(database_examined.time, "time", lambda: real() + 60)
    ((level, message),) = levels(examined(), "clock")
    assert level == "warning"
    assert "60.0 s ahead" in message


def test_a_live_farm_is_fine_and_a_broker_that_forgets_is_not(
    examined, monkeypatch, broker, sqlite_url, database
):
    import redis

    from tasks.app import configure

    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    monkeypatch.setenv("FARM_DATABASE_URL", sqlite_url)
    settings.cache_clear()
    configure(settings())
    checks = examined()
    assert levels(checks, "broker memory")[0][0] == "ok"
    assert levels(checks, "workers") == [("warning", "no worker listens to the broker")]
    with redis.Redis.from_url(broker.redis_url) as client:
        before = client.config_get("maxmemory*")
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert levels(examined(), "broker memory")[0][0] == "problem"
            client.config_set("maxmemory-policy", "noeviction")
            assert levels(examined(), "broker memory")[0][0] == "ok"
            client.config_set("maxmemory", str(int(client.info("memory")["used_memory"] * 1.05)))
            assert levels(examined(), "broker memory")[0][0] == "warning"
            client.config_set("maxmemory", "100kb")
            ((level, told),) = levels(examined(), "broker memory")
            assert level == "problem"
            assert "the broker accepts no more messages" in told
        finally:
            for name in ("maxmemory", "maxmemory-policy"):
                client.config_set(name, before[name])


@pytest.mark.parametrize(
    ("torch", "driver", "level"),
    [
        (Installed("2.13.0+cpu", None), None, "ok"),
        (Installed("2.13.0+cpu", None), (13, 0), "problem"),
        (Installed("2.11.0+cu130", "13.0"), (13, 0), "ok"),
        (Installed("2.11.0+cu130", "13.0"), (12, 8), "problem"),
        (Installed("2.11.0+cu126", "12.6"), (13, 0), "ok"),
        (Installed("2.11.0+cu128", "12.8"), (12, 4), "warning"),
    ],
)
def test_torch_is_held_against_the_driver(torch, driver, level):
    check = torch_against_driver(torch, driver)
    assert check.level == level
    assert bool(check.next_step) == (level != "ok")


def test_a_gpu_host_is_examined_through_its_driver(examined, monkeypatch):
    monkeypatch.setattr(host_examined, "installed_torch", lambda: Installed("2.11.0+cu130", "13.0"))
    with behind_pynvml(monkeypatch) as library:
        library.processes = [1]
        checks = examined()
    assert levels(checks, "driver") == [("ok", "580.00, supports CUDA up to 13.0")]
    assert levels(checks, "torch")[0][0] == "ok"
    here = levels(checks, "card 0 here")
    assert [level for level, _ in here] == ["ok", "warning"]
    assert "other processes compute on " in here[1][1]
    assert ": 1 (" in here[1][1]


def test_a_vendor_without_checks_of_its_driver_is_examined_by_its_cards(examined, monkeypatch):
    monkeypatch.setattr(drivers, "CHECKS", {})
    with behind_pynvml(monkeypatch):
        checks = examined()
    assert levels(checks, "driver") == []
    assert levels(checks, "card 0 here")[0][0] == "ok"


def test_a_gpu_that_does_not_answer_is_a_warning_beside_another_and_a_problem_alone(
    examined, monkeypatch
):
    with behind_pynvml(monkeypatch) as library:
        library.uuids = [UUID, OTHER_UUID]
        library.faults["nvmlDeviceGetHandleByIndex_v2", 1] = pynvml.NVML_ERROR_GPU_IS_LOST
        checks = examined()
        assert levels(checks, "card 0 here")[0][0] == "ok"
        ((level, told),) = levels(checks, "card 1 here")
        assert level == "warning"
        assert "GPU is lost" in told
        library.uuids = [UUID]
        library.faults["nvmlDeviceGetHandleByIndex_v2", 0] = pynvml.NVML_ERROR_GPU_IS_LOST
        assert [level for level, _ in levels(examined(), "card 0 here")] == ["problem"]


def test_a_driver_that_refuses_is_no_host_without_a_card(examined, monkeypatch):
    monkeypatch.setattr(drivers, "has_nvidia_hardware", lambda: False)
    with behind_pynvml(monkeypatch) as library:
        library.lacks["nvmlInitWithFlags"] = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        checks = examined()
    assert [level for level, _ in levels(checks, "driver")] == ["problem"]
    ((level, told),) = levels(checks, "card 0 here")
    assert level == "problem"
    assert "restart the host" in told


def test_the_installed_torch_is_known_without_importing_it():
    import torch

    assert installed_torch() == Installed(torch.__version__, torch.version.cuda)


def test_an_nvidia_card_whose_driver_does_not_answer_is_seen_on_the_bus(tmp_path):
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert drivers.has_nvidia_hardware(tmp_path)
    (tmp_path / "a" / "class").write_text("0x0c0330\n")  # its USB controller
    assert not drivers.has_nvidia_hardware(tmp_path)


def test_a_stranger_on_a_card_is_named_and_the_worker_is_not_one(tmp_path):
    current = Settings(lock_dir=tmp_path)
    card = Card(id=UUID, kind="cuda", model="NVIDIA H200", memory_bytes=1)
    own = frozenset({os.getpid()})
    (found,) = host_examined._foreign("card", card, own, current)
    assert f"{os.getpid()} (" in found.message
    with CardLock(UUID, tmp_path):
        assert list(host_examined._foreign("card", card, own, current)) == []
        (found,) = host_examined._foreign("card", card, frozenset({os.getpid(), 1}), current)
        assert found.message.startswith(f"other processes compute on {card}: 1 (")


def test_a_lock_folder_that_is_not_the_hosts_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(farm_settings, "SERVICE_LOCK_DIR", tmp_path)
    monkeypatch.delenv("FARM_LOCK_DIR")
    assert farm_settings.Settings().lock_dir == tmp_path
    tmp_path.chmod(0o1777)
    assert host_examined._locks(tmp_path).level == "ok"
    told = host_examined._locks(tmp_path / "another")
    assert (told.level, told.next_step) == ("warning", "Unset FARM_LOCK_DIR.")
    assert str(tmp_path) in told.message
    monkeypatch.setattr(farm_settings, "SERVICE_LOCK_DIR", tmp_path / "not there")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert str(farm_settings.Settings().lock_dir) == "/tmp/farm-card-locks"
    assert host_examined._locks(tmp_path / "another").level == "ok"


def test_folders_room_and_secrets_are_looked_at(examined, monkeypatch, tmp_path):
    locks = Path(os.environ["FARM_LOCK_DIR"])
    locks.mkdir(mode=0o755)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "file" / "state"))
    config = tmp_path / "farm.toml"
    config.write_text('flower_basic_auth = "me:hidden"\n')
    config.chmod(0o644)
    monkeypatch.setenv("FARM_CONFIG", str(config))
    monkeypatch.setenv("FARM_DATABASE_URL", f"sqlite:///{tmp_path / 'farm.db'}")
    monkeypatch.setattr(host_examined, "DISK_PROBLEM_BYTES", sys.maxsize)
    monkeypatch.setattr(host_examined, "DISK_WARNING_BYTES", sys.maxsize)
    checks = examined()
    assert levels(checks, "state folder")[0][0] == "problem"
    assert levels(checks, "lock folder")[0][0] == "warning"
    assert levels(checks, "settings file")[0][0] == "warning"
    assert levels(checks, "disk")[0][0] == "problem"
    assert "hidden" not in json.dumps(checks)


def test_a_folder_that_the_kernel_refuses_or_that_is_a_file_cannot_be_made(
    examined, monkeypatch, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARM_LOCK_DIR", "/proc/nope")
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "file"))
    checks = examined()
    ((level, told),) = levels(checks, "lock folder")
    assert level == "problem"
    assert "/proc/nope cannot be created" in told
    assert levels(checks, "state folder") == [
        (
            "problem",
            f"the folder {tmp_path / 'file'} cannot be created: {tmp_path / 'file'} is a file",
        )
    ]
    assert levels(checks, "disk") == []


def test_readings_that_wait_for_the_database_are_told(examined):
    spool = Path(os.environ["FARM_STATE_DIR"]) / "spool"
    spool.mkdir(parents=True)
    (spool / "1-a.json").write_text("{}")
    assert levels(examined(), "spool")[0][0] == "warning"


def test_a_state_folder_that_other_users_can_read_is_told(examined, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("FARM_STATE_DIR", folder)
        (Path(folder) / "farm.db").touch(0o644)
        assert levels(examined(), "privacy") == []
        Path(folder).chmod(0o755)
        assert levels(examined(), "privacy") == [
            ("warning", f"other users of this host can access {path} ({mode})")
            for path, mode in ((folder, "drwxr-xr-x"), (f"{folder}/farm.db", "-rw-r--r--"))
        ]


def test_a_pipe_in_the_place_of_a_lock_stops_no_check(examined, tmp_path, monkeypatch):
    monkeypatch.setenv("FARM_LOCK_DIR", str(tmp_path / "locks"))
    (tmp_path / "locks").mkdir()
    for card in discover(settings()):
        os.mkfifo(CardLock(card.id, tmp_path / "locks").path)
    assert levels(examined(), "load")


def test_files_that_the_spool_put_aside_are_told(examined):
    aside = Path(os.environ["FARM_STATE_DIR"]) / "spool" / "unreadable"
    aside.mkdir(parents=True)
    (aside / "1-a.json").write_bytes(b"\xff")
    (aside.parent / "2-b.json.refused").write_text("{}")
    ((level, told),) = levels(examined(), "spool")
    assert level == "problem"
    assert told.startswith(f"2 readings in {aside.parent} ")
    assert told.endswith(": 1-a.json, 2-b.json.refused")
