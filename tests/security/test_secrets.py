"""Passwords of the broker, of the database and of Flower show nowhere: logs, process titles,
``--json``, Flower, metrics."""

from __future__ import annotations

import time

import psutil
import pytest
import redis

from farm.errors import BrokerUnreachable
from farm.settings import settings
from tasks.app import check_broker
from tasks.servers import BrokerServer
from tests import slow
from tests.farms import running
from tests.flowers import AUTH, flower_of, free_port

BROKER, DATABASE = "broker-pass-4711", "database-pass-0815"
SECRETS = (BROKER, DATABASE, AUTH.split(":")[1])


@slow.FAULT
def test_no_secret_of_a_running_farm_can_be_read(tmp_path, postgres_url):
    acl = tmp_path / "users.acl"
    acl.write_text(
        f"user default off\nuser farm on >{BROKER} ~* &* +@all\nuser health on nopass -@all +ping\n"
    )
    metrics = free_port()
    database_url = postgres_url.replace("postgres@", f"postgres:{DATABASE}@")
    with BrokerServer(options={"aclfile": str(acl)}, ping_as="health") as broker:
        broker_url = f"redis+socket://farm:{BROKER}@{broker.socket}"
        with redis.Redis(
            unix_socket_path=str(broker.socket), username="farm", password=BROKER
        ) as client:
            assert client.ping()
        with (
            running(
                tmp_path,
                broker_url,
                database_url,
                FARM_FLOWER_BASIC_AUTH=AUTH,
                FARM_METRICS_PORT=str(metrics),
                FARM_METRICS_ADDRESS="127.0.0.1",
            ) as farm,
            flower_of(farm) as (_, page),
        ):
            job_id = farm.submit(["", "crash", "oom"])
            farm.wait_for(lambda: farm.ended(job_id))
            told = answers(farm, *VERBS)
            debugged = farm.ask("--debug", "report", "nosuchjob")
            told["debug"] = debugged.stdout + debugged.stderr
            for path in (
                "/",
                "/tasks",
                "/broker",
                "/api/workers?refresh=1",
                "/api/tasks",
                "/metrics",
            ):
                told[f"flower {path}"] = page.get(path)[1]
            told["process titles"] = "\n".join(titles())
            # What goes wrong is told with the URL that it went wrong with.
            broker.stop()
            time.sleep(2)
            told["no broker"] = "".join(
                answers(farm, ("submit", "resnet18"), ("doctor", "--json")).values()
            )
            broker.start()
        told["log"] = farm.log.read_text()
    assert "SIM-" in told["cards --json"]
    assert "1 card worker and 1 control worker" in told["doctor"]
    assert "Traceback" in told["debug"]
    assert "does not answer" in told["no broker"]
    assert [
        (where, secret) for where, text in told.items() for secret in SECRETS if secret in text
    ] == []


@pytest.mark.parametrize(
    "url",
    [
        "redis://farm:the-password@broker.example:6379/0",
        "rediss://farm:the-password@broker.example:6379/0",
        "redis+socket://farm:the-password@/run/broker.sock",
    ],
)
def test_a_connection_tells_its_url_without_the_password_and_still_knows_it(url):
    from tasks.app import app

    connection = app.connection(url)
    told = {
        name: value for name, value in connection.info().items() if name != "password"
    }  # as Celery leaves it out
    assert "the-password" not in str(told) + connection.as_uri() + repr(connection)
    if "+socket" not in url:
        assert "the-password" in connection.as_uri(include_password=True), "Flower connects by it"
        assert connection.clone().password == "the-password"


@pytest.mark.parametrize("known", [":another@", "nobody:another@", ""])
def test_a_broker_that_refuses_a_password_is_told_as_that(monkeypatch, known):
    with BrokerServer() as broker:
        with redis.Redis.from_url(broker.redis_url) as client:
            client.config_set("requirepass", BROKER)
        monkeypatch.setenv("FARM_BROKER_URL", broker.url.replace("://", f"://{known}"))
        settings.cache_clear()
        with pytest.raises(BrokerUnreachable, match="refuses the user or the password") as caught:
            check_broker(settings())
    assert "another" not in caught.value.message


VERBS = (
    ("settings", "--json"),
    ("settings",),
    ("doctor", "--json"),
    ("doctor",),
    ("cards", "--json"),
    ("jobs", "--json"),
    ("db", "check"),
)


def answers(farm, *verbs):
    """What each verb says."""
    told = {}
    for words in verbs:
        said = farm.say(*words)
        told[" ".join(words)] = said.stdout + said.stderr
    return told


def titles():
    for process in psutil.process_iter():
        try:
            yield " ".join(process.cmdline())
        except psutil.Error:
            continue
