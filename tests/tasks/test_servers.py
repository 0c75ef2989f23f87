"""The private broker: reachable by its owner alone, restartable, gone with its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest
import redis
from celery import Celery

from farm.errors import BrokerUnreachable
from tasks.servers import BrokerServer, broker_program


@pytest.fixture
def client_of():
    return lambda server: redis.Redis.from_url(server.redis_url)


def test_only_its_owner_reaches_it(client_of):
    with BrokerServer() as server:
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        assert [
            c
            for c in psutil.Process(server.pid).net_connections()
            if c.status == psutil.CONN_LISTEN
        ] == []
        assert client_of(server).ping()
        assert client_of(server).config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"


def test_leaves_nothing_behind():
    with BrokerServer() as server:
        folder, pid = server.folder, server.pid
    assert not folder.exists()
    assert not psutil.pid_exists(pid)


def test_celery_accepts_its_url_as_broker_and_as_result_backend():
    with BrokerServer() as server:
        app = Celery(broker=server.url, backend=server.url)
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1)
        app.backend.store_result("an-id", {"answer": 42}, "SUCCESS")
        assert app.AsyncResult("an-id").get(timeout=30) == {"answer": 42}
        assert redis.Redis.from_url(server.redis_url).dbsize() == 1


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_persistent_broker_remembers_over_a_restart(client_of, end):
    with BrokerServer(options={"appendonly": "yes", "appendfsync": "always"}) as server:
        client_of(server).set("key", "value")
        getattr(server, end)()
        assert server.pid is None
        server.start()
        assert client_of(server).get("key") == b"value"


def test_another_broker_forgets(client_of):
    with BrokerServer() as server:
        client_of(server).set("key", "value")
        server.kill()
        server.start()
        assert client_of(server).get("key") is None


def test_dies_with_an_owner_that_is_killed():
    code = (
        "from tasks.servers import BrokerServer as B; import time; b = B(); b.start(); "
        "print(b.pid, b.folder, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, folder = owner.stdout.readline().split()
    assert psutil.pid_exists(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(30)
    with contextlib.suppress(
        FileNotFoundError
    ):  # a server of another test may have swept it up already
        os.utime(folder, (time.time() - 3600,) * 2)
    with BrokerServer():  # the next one sweeps up
        assert not os.path.exists(folder)


def test_ctrl_c_is_not_for_the_broker():
    with BrokerServer() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_broker_that_cannot_start_says_why():
    with (
        pytest.raises(BrokerUnreachable, match=r"did not start: .*maxmemory") as caught,
        BrokerServer(options={"maxmemory": "plenty"}),
    ):
        pass
    assert "FARM_BROKER_URL" in caught.value.next_step


def test_a_machine_without_any_server_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BrokerUnreachable, match="no Redis or Valkey") as caught:
        broker_program()
    assert "valkey-server" in caught.value.next_step


def test_a_system_server_wins_over_the_wheel(monkeypatch, tmp_path):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert broker_program() == program
