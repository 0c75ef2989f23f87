"""Everything that stops work is a problem of ``farm doctor``, with a next step and exit code 1."""

import subprocess
import time

import pytest
import redis
from sqlalchemy import update
from sqlmodel import col

from farm.jobs import cards
from farm.settings import settings
from farm.store import tables
from tasks.app import configure
from tasks.servers import BrokerServer
from tests.planned import plan, register

PASSWORD = "broker-pass-4711"


@pytest.fixture(scope="module")
def server():
    """A broker that the tests may change."""
    with BrokerServer() as broker:
        yield broker


@pytest.fixture
def admin(server):
    with redis.Redis.from_url(server.redis_url) as client:
        yield client
        client.execute_command("REPLICAOF", "NO", "ONE")
        for name, value in {
            "min-replicas-to-write": 0,
            "maxmemory": 0,
            "stop-writes-on-bgsave-error": "no",
            "save": "",
        }.items():
            client.config_set(name, value)


@pytest.fixture
def at(server, monkeypatch):
    """Let the commands of a test use a broker as some user."""

    def use(account="", broker=server):
        monkeypatch.setenv("FARM_BROKER_URL", f"redis+socket://{account}{broker.socket}")
        settings.cache_clear()
        configure(settings())

    use()
    yield use
    monkeypatch.delenv("FARM_BROKER_URL")
    settings.cache_clear()
    configure(settings())


def problems(checks, name):
    found = [check for check in checks if check["level"] == "problem" and check["name"] == name]
    assert all(check["next_step"] for check in found)
    return [check["message"] for check in found]


def does_not_save(admin, server):
    (server.folder / "dump.rdb").mkdir(exist_ok=True)  # a folder in the place of its file
    admin.config_set("save", "3600 1")
    admin.config_set("stop-writes-on-bgsave-error", "yes")
    admin.bgsave()
    while admin.info("persistence")["rdb_bgsave_in_progress"]:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("refuse", "told"),
    [
        (lambda admin, _: admin.config_set("min-replicas-to-write", 1), "too few replicas"),
        (lambda admin, _: admin.config_set("maxmemory", "100kb"), "is full"),
        (lambda admin, _: admin.execute_command("REPLICAOF", "127.0.0.1", "1"), "is a replica"),
        (does_not_save, "cannot write to its disk"),
    ],
    ids=["no replica", "full", "a replica", "no disk"],
)
def test_a_broker_that_answers_and_takes_no_messages_is_a_problem(
    examined, server, admin, at, refuse, told
):
    assert problems(examined(), "broker") == []
    refuse(admin, server)
    (message,) = problems(examined(), "broker")
    assert told in message


@pytest.mark.parametrize(
    ("rights", "named"),
    [
        ("~* &* +@all -brpop", "BRPOP"),
        ("~* &* +@all -publish", "PUBLISH"),
        ("~* &* +@all -@scripting", "EVALSHA, SCRIPT"),
        ("~* &* +@all -@transaction", "WATCH, MULTI"),
        ("~* +@all resetchannels", "PUBLISH, PSUBSCRIBE"),
        ("~unacked* &* +@all", "LPUSH"),
        ("~* &* +@all -@write", "LPUSH, RPUSH, BRPOP"),
    ],
)
def test_a_user_who_may_not_send_what_the_farm_sends_is_a_problem(
    examined, admin, at, rights, named
):
    admin.execute_command(
        "ACL", "SETUSER", "someone", "reset", "on", f">{PASSWORD}", *rights.split()
    )
    at(f"someone:{PASSWORD}@")
    (message,) = problems(examined(), "broker")
    assert f"refuses commands to this user: {named}" in message
    assert PASSWORD not in message


def test_the_rights_that_a_farm_needs_are_enough_and_the_check_leaves_nothing_behind(
    examined, server, admin, at
):
    rights = (
        "~card.* ~control ~unacked* ~_kombu.* ~celery-taskset-meta-* &* +@all -@admin -@dangerous "
        "+info"
    )
    admin.execute_command(
        "ACL", "SETUSER", "someone", "reset", "on", f">{PASSWORD}", *rights.split()
    )
    at(f"someone:{PASSWORD}@")
    admin.flushall()
    admin.lpush("card.SIM-0", "a message")
    with admin.monitor() as commands:
        assert problems(examined(), "broker") == []
        admin.echo("the end")
        sent = []
        while not (command := commands.next_command()["command"]).startswith("ECHO"):
            sent.append(command)
    assert any(command.startswith("BRPOP") for command in sent)
    assert admin.lrange("card.SIM-0", 0, -1) == [b"a message"]
    left = [
        key for key in admin.keys("*") if b"_kombu.binding" not in key
    ]  # Celery's, for the answers to the ping
    assert left == [b"card.SIM-0"]


class LoadingBroker(BrokerServer):
    """Its `start` returns before the server has loaded its file."""

    def _answers(self):
        return self.socket.exists()


def test_a_broker_that_still_loads_its_file_is_a_problem(examined, at):
    with LoadingBroker() as broker:
        with redis.Redis.from_url(broker.redis_url) as client:
            client.mset({f"key-{number}": "x" * 100 for number in range(2000)})
            client.save()
        broker.kill()
        broker.options = {
            "key-load-delay": "10000",
            "loading-process-events-interval-bytes": "1024",
        }  # 10 ms per key
        broker.start()
        at(broker=broker)
        (message,) = problems(examined(), "broker")
        broker.kill()
    assert "still loads its file" in message


def test_a_broker_that_accepts_connections_and_never_answers_is_a_problem(examined, at, server):
    subprocess.run(["kill", "-STOP", str(server.pid)], check=True)
    try:
        (message,) = problems(examined(), "broker")
    finally:
        subprocess.run(["kill", "-CONT", str(server.pid)], check=True)
    assert "does not answer" in message


def test_a_database_that_takes_no_writes_is_a_problem(
    examined, postgres_server, postgres_database, monkeypatch
):
    url = postgres_database.url.render_as_string(hide_password=False)
    monkeypatch.setenv("FARM_DATABASE_URL", url)
    assert problems(examined(), "database") == []
    read_only = url + "&options=-c%20default_transaction_read_only%3Don"
    monkeypatch.setenv("FARM_DATABASE_URL", read_only)
    (message,) = problems(examined(), "database")
    assert "is read-only" in message
    with postgres_server.connect(postgres_database.url.database) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
        try:
            monkeypatch.setenv("FARM_DATABASE_URL", url.replace("postgres@", "reader@"))
            (message,) = problems(examined(), "database")
        finally:
            connection.execute("DROP OWNED BY reader; DROP ROLE reader")
    assert "refuses its user: permission denied" in message


def unseen(database, card_id):
    with database.write() as session:
        session.execute(
            update(tables.CardRow)
            .where(col(tables.CardRow.id) == card_id)
            .values(last_seen_at_s=1.0)
        )


@pytest.mark.parametrize(
    ("leave", "told", "step"),
    [
        (
            lambda database: cards.quarantine(database, "SIM-0", "it is hot"),
            "SIM-0 is quarantined",
            "farm cards release",
        ),
        (
            lambda database: cards.drain(database, "SIM-0"),
            "SIM-0 is draining",
            "farm cards resume SIM-0",
        ),
        (
            lambda database: cards.stopped(database, "holder-0"),
            "SIM-0 is stopped",
            "Start `farm worker` on here",
        ),
        (
            lambda database: unseen(database, "SIM-0"),
            "SIM-0 is lost",
            "Start `farm worker` on here",
        ),
    ],
    ids=["quarantined", "drained", "stopped", "lost"],
)
def test_items_that_wait_without_a_card_that_could_measure_them_are_a_problem(
    examined, database, monkeypatch, leave, told, step
):
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string(hide_password=False))
    register(database, 0)
    register(database, 1, model="another card")
    plan(database, ["SIM-0"], number=2)
    assert problems(examined(), "cards") == []
    leave(database)
    checks = examined()
    (message,) = problems(checks, "cards")
    assert "but 2 items must be measured" in message
    assert told in message
    assert any(step in check["next_step"] for check in checks if check["name"] == "cards")
    register(database, 2)  # one of the same model and software
    assert problems(examined(), "cards") == []


def test_items_of_a_run_that_was_killed_wait_for_no_card_of_the_farm(
    examined, database, monkeypatch
):
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string(hide_password=False))
    register(database, 0)
    plan(database, ["SIM-0"])
    cards.stopped(database, "holder-0")
    with database.write() as session:
        session.execute(update(tables.Job).values(farm="embedded:elsewhere:1:a"))
    assert problems(examined(), "cards") == []


def test_workers_that_do_not_answer_while_items_wait_are_a_problem(
    examined, database, at, monkeypatch
):
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string(hide_password=False))
    register(database, 0)
    assert problems(examined(), "workers") == []
    plan(database, ["SIM-0"])
    (message,) = problems(examined(), "workers")
    assert "1 item must be measured" in message


def test_a_card_whose_worker_was_not_seen_for_long_is_a_problem(examined, database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string(hide_password=False))
    register(database, 0, 1)
    unseen(database, "SIM-1")
    ((message,),) = [problems(examined(), "card here:1")]
    assert "SIM-1 has sent no heartbeat" in message
