"""What lies under ``deploy/`` does what it says, as far as it can be tried without containers and
without root.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psycopg
import pytest
import redis
import yaml
from sqlalchemy import text

from farm.errors import DatabaseUnreachable
from farm.models import catalog
from farm.settings import Settings, settings
from farm.store.database import Database
from tasks.servers import BrokerServer
from tasks.supervisor import stop_grace_s
from tests import slow
from tests.farms import running
from tests.flowers import flower_of
from tests.planned import know
from tests.report import rows
from tests.tls import TlsProxy

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = ["compose.yml", "compose.worker.yml"]
SCRIPTS = [
    "ci/compare-revisions",
    "make-secrets",
    "postgres/10-roles.sh",
    "slurm/card-check.sbatch",
    "slurm/farm-worker.sbatch",
]


@pytest.fixture(scope="session")
def secrets(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("deploy") / "secrets"
    subprocess.run(
        [DEPLOY / "make-secrets", "broker.example", folder], check=True, capture_output=True
    )
    return folder


@pytest.fixture
def farm_toml(secrets, tmp_path, monkeypatch):
    """The settings that every host gets, with another port and the certificate where it lies
    here.
    """

    def rewritten(port):
        path = tmp_path / "farm.toml"
        content = (
            (secrets / "farm.toml").read_text().replace("/etc/farm/ca.crt", str(secrets / "ca.crt"))
        )
        path.write_text(re.sub(r"@broker\.example:\d+", f"@localhost:{port}", content))
        monkeypatch.setenv("FARM_CONFIG", str(path))
        settings.cache_clear()
        return settings()

    return rewritten


def test_secrets_are_for_their_owner_and_never_overwritten(secrets):
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o600}
    again = subprocess.run(
        [DEPLOY / "make-secrets", "broker.example", secrets], capture_output=True, text=True
    )
    assert again.returncode != 0
    assert "exists" in again.stderr


@pytest.mark.parametrize("host", ["--help", "a,DNS:evil", 'a"\nbroker_url = "x', "a b"])
def test_a_host_is_neither_an_option_nor_a_part_of_a_file(host, tmp_path):
    done = subprocess.run(
        [DEPLOY / "make-secrets", host, tmp_path / "secrets"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "is no name or address of a host" in done.stderr
    assert not (tmp_path / "secrets").exists()


def test_a_folder_of_secrets_is_never_an_option(tmp_path):
    command = [DEPLOY / "make-secrets", "broker.example", "--mode=0777"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "--mode=0777" / "farm.toml").exists()


@pytest.mark.parametrize("server", ["redis", "postgres"])
def test_certificates_are_for_the_broker_host_alone(secrets, server):
    def verify(host):
        command = [
            "openssl",
            "verify",
            "-CAfile",
            "ca.crt",
            "-verify_hostname",
            host,
            f"{server}.crt",
        ]
        return subprocess.run(command, cwd=secrets, capture_output=True).returncode

    assert verify("broker.example") == 0
    assert verify("other.example") != 0


def a_farm_works(tmp_path, current):
    """Worker, `farm submit` and Flower with the settings that the hosts get: verdict, queues and
    workers are there.
    """
    database_url = f"sqlite:///{tmp_path / 'farm.db'}"
    with (
        running(tmp_path, current.broker_url, database_url, FARM_SIMULATED_ITEM_S="0.02") as farm,
        flower_of(farm, current.flower_basic_auth) as (_, page),
    ):
        know(farm.database, "resnet18")
        submitted = farm.ask("submit", "resnet18", "--wait")
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr

        def queues():
            status, told = page.get("/api/queues/length")
            assert status == 200, farm.log.read_text()[-3000:]
            found = {
                queue["name"]: queue["messages"] for queue in json.loads(told)["active_queues"]
            }
            return (
                found if len(found) == 2 else None
            )  # it asks the workers for them every now and then

        found = farm.wait_for(queues)
        assert found == {"control": 0, f"card.{farm.alive()[0].id}": 0}
        assert "Unable to get queues" not in page.get("/broker")[1] + farm.log.read_text()
        assert {task["state"] for task in page.tasks().values()} == {"SUCCESS"}


@slow.FAULT
def test_a_farm_needs_no_more_than_the_broker_allows(secrets, farm_toml, tmp_path):
    with (
        BrokerServer(options={"aclfile": str(secrets / "users.acl")}, ping_as="health") as broker,
        TlsProxy(broker.socket, secrets / "redis.crt", secrets / "redis.key") as proxy,
    ):
        a_farm_works(tmp_path, farm_toml(proxy.port))


def test_strangers_get_nothing_from_the_broker(secrets, farm_toml):
    with BrokerServer(options={"aclfile": str(secrets / "users.acl")}, ping_as="health") as broker:
        health = redis.Redis(
            unix_socket_path=str(broker.socket), username="health", password="none"
        )
        assert health.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            health.llen("control")
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(unix_socket_path=str(broker.socket)).ping()
        password = farm_toml(0).broker_url.split(":")[2].partition("@")[0]
        farm = redis.Redis(unix_socket_path=str(broker.socket), username="farm", password=password)
        for forbidden in (
            ["FLUSHALL"],
            ["CONFIG", "GET", "*"],
            ["ACL", "LIST"],
            ["SHUTDOWN"],
            ["KEYS", "*"],
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                farm.execute_command(*forbidden)


def test_the_broker_accepts_its_configuration(secrets, tmp_path):
    # Without the lines on TLS, which the wheel's server was built without.
    lines = [
        line
        for line in (DEPLOY / "redis/redis.conf").read_text().splitlines()
        if not line.startswith("tls-")
    ]
    (tmp_path / "redis.conf").write_text("\n".join(lines).replace("/etc/farm-broker", str(secrets)))
    with BrokerServer(config=tmp_path / "redis.conf", ping_as="health") as broker:
        assert broker.pid


def test_a_redis_with_tls_takes_the_configuration_as_it_is(secrets, farm_toml, tmp_path):
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if not program:
        pytest.skip("needs a redis-server on PATH, built with TLS")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    content = (DEPLOY / "redis/redis.conf").read_text().replace("/etc/farm-broker", str(secrets))
    (tmp_path / "redis.conf").write_text(
        content.replace("tls-port 6379", f"tls-port {port}\nbind 127.0.0.1")
    )
    log = tmp_path / "redis.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [program, tmp_path / "redis.conf", "--dir", tmp_path], stdout=output, stderr=output
        )
    try:
        url = farm_toml(port).broker_url
        deadline = time.monotonic() + 60
        while True:
            try:
                assert redis.Redis.from_url(url).ping()
                break
            except redis.ConnectionError:
                if server.poll() is not None and "TLS" in log.read_text():
                    pytest.skip("this server was built without TLS")
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        stranger = url.replace(str(secrets / "ca.crt"), str(other_authority(secrets)))
        with pytest.raises(redis.ConnectionError, match="certificate"):
            redis.Redis.from_url(stranger).ping()
        with pytest.raises(redis.RedisError):  # without TLS it does not even talk
            redis.Redis(port=port, socket_timeout=3).ping()
        a_farm_works(tmp_path, settings())
    finally:
        server.kill()
        server.wait()


def test_the_database_url_works_over_tls_and_refuses_another_certificate(
    secrets, farm_toml, postgres_server
):
    with TlsProxy(
        postgres_server.socket, secrets / "postgres.crt", secrets / "postgres.key", postgres=True
    ) as proxy:
        with postgres_server.connect() as connection:
            connection.execute("CREATE ROLE farm SUPERUSER LOGIN")
            connection.execute("CREATE DATABASE farm OWNER farm")
        url = farm_toml(proxy.port).database_url
        database = Database(url)
        database.upgrade()
        database.check_schema()
        database.close()
        stranger = Database(url.replace(str(secrets / "ca.crt"), str(other_authority(secrets))))
        with pytest.raises(DatabaseUnreachable, match="certificate"):
            stranger.check_schema()


@pytest.fixture
def tls_postgres(secrets, postgres_server):
    """The port of a PostgreSQL of the system, which has TLS as the wheel's has not, set up as
    compose.yml does it.
    """
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4])
    )
    if not found:
        pytest.skip("needs a PostgreSQL in /usr/lib/postgresql")
    programs, folder = found[-1].parent, postgres_server.folder / "tls"
    owner = (postgres_server.data / "base").stat()  # it refuses to run as root, as the wheel's does
    who = (
        {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        if os.geteuid() == 0
        else {}
    )
    folder.mkdir(mode=0o700)
    for name in ("postgres.crt", "postgres.key", "postgres_password"):
        shutil.copy(secrets / name, folder)
        (folder / name).chmod(0o400)
    for path in [folder, *folder.iterdir()]:
        os.chown(path, owner.st_uid, owner.st_gid)
    words = [
        "-D",
        "data",
        "-U",
        "farm",
        "--pwfile=postgres_password",
        "--auth=scram-sha-256",
        "--no-sync",
        "-E",
        "utf8",
    ]
    made = subprocess.run(
        [programs / "initdb", *words], cwd=folder, capture_output=True, text=True, **who
    )
    assert made.returncode == 0, made.stderr
    access = folder / "data/pg_hba.conf"
    access.write_text("hostssl all farm all scram-sha-256\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": "",
        "ssl": "on",
        "ssl_cert_file": folder / "postgres.crt",
        "ssl_key_file": folder / "postgres.key",
        "ssl_min_protocol_version": "TLSv1.2",
        "password_encryption": "scram-sha-256",
        "fsync": "off",
    }
    command = [
        programs / "postgres",
        "-D",
        "data",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, **who)
    try:
        deadline = time.monotonic() + 60
        while "ready to accept connections" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield port
    finally:
        server.send_signal(signal.SIGQUIT)
        server.wait()
        shutil.rmtree(folder)


def test_a_postgresql_with_tls_takes_the_hosts_url_and_nothing_less(
    secrets, farm_toml, tls_postgres
):
    url = farm_toml(tls_postgres).database_url
    with psycopg.connect(url.replace("/farm?", "/postgres?"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE farm")
    database = Database(url)
    database.upgrade()
    database.check_schema()
    with database.engine.connect() as connection:
        used = connection.execute(
            text("SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        ).one()
    assert used.ssl
    assert used.version in ("TLSv1.2", "TLSv1.3")
    database.close()
    for refused, why in {
        url.replace(str(secrets / "ca.crt"), str(other_authority(secrets))): "certificate",
        re.sub(r"\?.*", "?sslmode=disable", url): "no encryption",
        re.sub(r":[0-9a-f]+@", ":wrong@", url): "password authentication failed",
    }.items():
        stranger = Database(refused)
        with pytest.raises(DatabaseUnreachable, match=why):
            stranger.check_schema()
        stranger.close()


def other_authority(secrets):
    folder = secrets.parent / "other"
    if not folder.exists():
        subprocess.run(
            [DEPLOY / "make-secrets", "broker.example", folder], check=True, capture_output=True
        )
    return folder / "ca.crt"


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_hang_together(name):
    file = yaml.safe_load((DEPLOY / name).read_text())
    for service in file["services"].values():
        assert re.search(r":[\w.-]+\}?$", service["image"]), "images are pinned to a version"
        assert ":latest" not in service["image"]
        assert set(service.get("secrets", [])) <= set(file.get("secrets", {}))
        assert set(service.get("depends_on", {})) <= set(file["services"])
        assert service["logging"]["options"], "logs are bounded"
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("./") and not source.startswith("./secrets/"):
                assert (DEPLOY / source).exists()
            elif not source.startswith(("/", ".")):
                assert source in file["volumes"]
        for port in service.get("ports", []):
            local = port.startswith(("127.0.0.1:", "${FARM_METRICS_BIND:-127.0.0.1}:"))
            assert port in ("6379:6379", "5432:5432") or local, "only TLS is open"


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_are_what_their_specification_allows(name):
    checked("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / name)


@pytest.mark.parametrize(
    ("schema", "name"),
    [("github-actions", "github/action.yml"), ("gitlab-ci", "gitlab/farm.gitlab-ci.yml")],
)
def test_the_examples_for_ci_systems_are_what_their_schemas_allow(schema, name):
    """tests/api/test_pytest_plugin.py runs the step of the action."""
    transform = ["--data-transform", "gitlab-ci"] if schema == "gitlab-ci" else []
    checked("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *transform, DEPLOY / name)


def test_the_broker_hosts_image_is_built_without_cuda_as_its_name_says():
    for service in yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"].values():
        if "build" in service:
            assert service["image"] == "${FARM_IMAGE:-operator-farm:cpu}"
            assert re.fullmatch(
                r"\$\{TORCH_INDEX-https://\S+/cpu\}", service["build"]["args"]["TORCH_INDEX"]
            )


def test_the_image_is_built_by_the_rules():
    checked("hadolint", DEPLOY / "Dockerfile")


def checked(program, *arguments):
    """Run one of the checkers that come as wheels, where there is one for this machine."""
    beside = Path(sys.executable).parent
    if not (
        found := shutil.which(program, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    ):
        pytest.skip(f"needs {program}, of the extra dev")
    said = subprocess.run([found, *arguments], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_reads_its_files(name, monkeypatch):
    if (
        not shutil.which("docker")
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("needs docker compose")
    for variable in ("BROKER_HOST", "FARM_HOST"):
        monkeypatch.setenv(variable, "broker.example")
    subprocess.run(["docker", "compose", "-f", DEPLOY / name, "config", "-q"], check=True)


def test_every_secret_of_the_compose_file_is_made(secrets):
    declared = yaml.safe_load((DEPLOY / "compose.yml").read_text())["secrets"]
    assert {Path(secret["file"]).name for secret in declared.values()} <= {
        path.name for path in secrets.iterdir()
    }


@pytest.mark.parametrize(
    "unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.name
)
def test_systemd_accepts_the_unit(unit, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    # The program is not installed here, and systemd looks whether it is.
    content = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text())
    (tmp_path / unit.name).write_text(content)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name],
        capture_output=True,
        text=True,
    )
    # Faults of the machine's own units are told as well.
    assert unit.stem not in verified.stderr + verified.stdout


def test_services_give_a_worker_longer_than_it_gives_its_item():
    unit = (DEPLOY / "systemd/farm-worker.service").read_text()
    worker = yaml.safe_load((DEPLOY / "compose.worker.yml").read_text())["services"]["worker"]
    given = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M) + re.findall(
        r"^(\d+)s$", worker["stop_grace_period"]
    )
    assert len(given) == 2
    assert min(map(int, given)) > stop_grace_s(Settings())


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_well_formed(script):
    assert (DEPLOY / script).read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", DEPLOY / script], check=True)
    checked("shellcheck", DEPLOY / script)


@pytest.fixture
def role_maker(postgres_server):
    """Run 10-roles.sh as the image does, once: as the server's own user, with the password of a
    file.
    """
    folder = postgres_server.folder / "init"
    folder.mkdir()
    server = (postgres_server.data / "base").stat()
    url = postgres_server.new_database()

    def make(password_file):
        script = shutil.copy(DEPLOY / "postgres/10-roles.sh", folder)
        environment = {
            "PATH": f"{postgres_server.programs}{os.pathsep}{os.environ['PATH']}",
            "PGHOST": str(postgres_server.folder),
            "POSTGRES_USER": "postgres",
            "POSTGRES_DB": url.rpartition("/")[2].partition("?")[0],
            "GRAFANA_PASSWORD_FILE": str(password_file),
        }
        who = (
            {"user": server.st_uid, "group": server.st_gid, "extra_groups": []}
            if os.geteuid() == 0
            else {}
        )
        return subprocess.run(
            ["bash", script], env=environment, cwd=folder, capture_output=True, text=True, **who
        )

    make.url, make.folder, make.user, make.group = url, folder, server.st_uid, server.st_gid
    yield make
    shutil.rmtree(folder)
    postgres_server.drop_database(url)
    with postgres_server.connect() as connection:
        connection.execute("DROP ROLE IF EXISTS grafana")


def stored_password(postgres_server):
    """What the server keeps of the password of Grafana's role, or None without such a role."""
    with postgres_server.connect() as connection:
        found = connection.execute(
            "SELECT coalesce(rolpassword, '') FROM pg_authid WHERE rolname = 'grafana'"
        )
        return next((password for (password,) in found), None)


def opens(password, stored):
    """Whether a password is the one of which PostgreSQL stored this."""
    _, iterations, salt, key, _ = re.split(r"[$:]", stored)
    salted = hashlib.pbkdf2_hmac(
        "sha256", password.encode(), base64.b64decode(salt), int(iterations)
    )
    return hashlib.sha256(
        hmac.digest(salted, b"Client Key", "sha256")
    ).digest() == base64.b64decode(key)


def test_the_read_only_role_can_read_and_nothing_else(role_maker, postgres_server, secrets):
    """With the secrets as the host has them, for root alone, and with the step of compose.yml that
    runs as root.
    """
    there = role_maker.folder / "farm-database"
    command = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]["postgres"][
        "command"
    ][0]
    for before, after in {
        "$$": "$",
        "/run/secrets": str(secrets),
        "/etc/farm-database": str(there),
        "-o postgres -g postgres": f"-o {role_maker.user} -g {role_maker.group}",
        "exec docker-entrypoint.sh": "exec true",
    }.items():
        assert before in command
        command = command.replace(before, after)
    subprocess.run(["bash", "-ec", command], check=True)
    there.chmod(0o755)  # as it is in the image, whatever the umask of the tests
    for _ in range(2):
        made = role_maker(there / "grafana_database_password")
        assert made.returncode == 0, made.stderr
    assert opens(
        (secrets / "grafana_database_password").read_text().strip(),
        stored_password(postgres_server),
    )

    database = Database(role_maker.url)
    database.upgrade()
    database.close()
    reader = Database(role_maker.url.replace("postgres@", "grafana@"))
    with reader.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM item")).scalar() == 0
        with pytest.raises(Exception, match="read-only"):
            connection.execute(text("DELETE FROM item"))
    reader.close()


@pytest.mark.parametrize("unusable", ["for root alone", "empty"])
def test_the_read_only_role_is_not_made_without_its_password(role_maker, postgres_server, unusable):
    file = role_maker.folder / "password"
    file.write_text("" if unusable == "empty" else "secret")
    file.chmod(0o644 if unusable == "empty" else 0)
    made = role_maker(file)
    assert made.returncode != 0
    assert ("is empty" if unusable == "empty" else "Permission denied") in made.stderr
    assert stored_password(postgres_server) is None


def test_no_password_is_given_to_psql_as_an_argument():
    script = (DEPLOY / "postgres/10-roles.sh").read_text()
    (command,) = re.findall(r"^psql .*$", script, re.M)
    assert "PASSWORD" not in command


def test_every_query_of_the_dashboard_runs_on_the_schema(postgres_url):
    dashboard = json.loads((DEPLOY / "grafana/dashboards/farm.json").read_text())
    queries = [
        target["rawSql"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if "rawSql" in target
    ]
    assert len(queries) > 10
    database = Database(postgres_url)
    database.upgrade()
    rows.model_job(database)
    with database.write() as session:
        session.execute(text("UPDATE item SET ended_at_s = 1000"))
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    with database.engine.connect() as connection:
        for query in queries:
            connection.execute(text(with_variables(query, [], [])))  # a new farm has no cards
        (measured,) = (query for query in queries if "AS measured FROM item" in query)

        def count(host, *cards):
            return connection.execute(text(with_variables(measured, [host], cards))).scalar()

        of_one, of_other = count("gpu-host", rows.CARD), count("gpu-host", rows.OTHER_CARD)
        assert min(of_one, of_other) > 0
        assert count("gpu-host", rows.CARD, rows.OTHER_CARD) == of_one + of_other
        assert count("other", rows.CARD) == 0
    database.close()


def with_variables(query, hosts, cards):
    """The query as Grafana sends it."""
    for name, values in (("host", hosts), ("card", cards)):
        query = query.replace(f"${{{name}:sqlstring}}", ",".join(f"'{value}'" for value in values))
    query = query.replace("$__unixEpochFrom()", "0").replace("$__unixEpochTo()", "2000000000")
    assert "$" not in query
    return query.replace("::text[]", r"\:\:text[]").replace("::numeric", r"\:\:numeric")


def test_every_panel_of_the_dashboard_is_of_the_chosen_hosts_and_cards():
    dashboard = json.loads((DEPLOY / "grafana/dashboards/farm.json").read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["host", "card"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target.get("rawSql") or target["expr"]
            for variable in ("host", "card"):
                assert re.search(rf"\$\{{?{variable}\b", query), panel["title"]


def test_the_dashboards_metrics_are_ones_that_flower_has():
    import flower.events

    dashboard = json.loads((DEPLOY / "grafana/dashboards/farm.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if "expr" in target
        for name in re.findall(r"flower_\w+", target["expr"])
    }
    known = Path(flower.events.__file__).read_text()
    assert asked
    assert [name for name in asked if f"'{name.removesuffix('_bucket')}'" not in known] == []


def test_the_dashboards_other_metrics_are_ones_that_the_farm_has(tmp_path):
    from farm.jobs.cards import CardStatus
    from farm.jobs.listing import CardCounts
    from farm.store.tables import CardRow
    from tasks.metrics import _items

    dashboard = (DEPLOY / "grafana/dashboards/farm.json").read_text()
    card = CardRow(id="GPU-1", kind="cuda", model="NVIDIA H200", host="gpu1")
    entry = CardCounts(CardStatus(card, "idle", "", 0, 0, 0.0), failed={"hung": 1})
    known = {sample.name for family in _items([entry]) for sample in family.samples}
    known |= {"farm_card_power_watts"}  # of the live card
    asked = set(re.findall(r"farm_[a-z_]+(?=\{)", dashboard)) - {"farm_database"}
    assert len(asked) > 6
    assert asked <= known


def test_prometheus_asks_the_workers_and_flower():
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert {"farm", "flower"} <= set(jobs)
    (found,) = jobs["farm"]["file_sd_configs"]
    for file in found["files"]:
        assert isinstance(
            yaml.safe_load((DEPLOY / "prometheus" / Path(file).name).read_text()), list
        )


def test_alerts_ask_for_metrics_that_there_are_and_are_documented():
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    page = (ROOT / "docs/monitoring.md").read_text()
    for rule in group["rules"]:
        assert f"`{rule['alert']}`" in page
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        for metric in re.findall(r"farm_[a-z_]+", rule["expr"]):
            assert f"`{metric}" in page, metric


def test_the_image_is_built_from_what_the_project_has():
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for path in ("constraints.txt", "pyproject.toml", "farm", "tasks", "cli", "LICENSE"):
        assert f"!{path}" in allowed
        assert (ROOT / path).exists()
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER 10001:10001$", dockerfile, re.M)
    assert re.search(r"^ENTRYPOINT \[\"farm\"\]$", dockerfile, re.M)


def test_a_farm_of_the_manual_or_the_image_builds_models_of_every_source():
    """The extras that a model needs, and PostgreSQL. The image has those of every command."""
    sources = {source.extra for source in catalog.SOURCES if source.extra}
    needed = {"postgresql", "quantization", "weights", *sources}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_commands = set(project["optional-dependencies"]) - {"amd", "test", "docs", "dev"}
    for file, least in (("deploy/Dockerfile", of_commands), ("docs/operate.md", needed)):
        found = re.findall(r"pip (?:install|wheel) .*\[([\w,]+)\]", (ROOT / file).read_text())
        assert found
        for extras in found:
            assert least <= set(extras.split(",")), f"{file}: {extras}"


@pytest.mark.parametrize("name", ["operate.md", "monitoring.md", "security.md"])
def test_the_manual_names_commands_and_files_that_are_there(name):
    import typer

    from cli.main import app

    page = (ROOT / "docs" / name).read_text()
    commands = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"(?:^    (?:sudo )?|`|/bin/)farm ([a-z]+)", page, re.M)) <= commands
    for link in re.findall(r"\]\(([\w./-]+)\)", page):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"`((?:deploy|tests|tasks|docs)/[\w./-]+)`", page):
        assert (ROOT / path).exists() or "secrets/" in path, path


def test_the_time_between_card_checks_is_a_setting_of_both_deployments():
    """Neither overrides check_every_s of farm.toml, until a person gives a value."""
    compose = yaml.safe_load((DEPLOY / "compose.worker.yml").read_text())
    variable = "FARM_CHECK_EVERY_S"
    assert compose["services"]["worker"]["environment"][variable] is None
    unit = (DEPLOY / "systemd/farm-worker.service").read_text()
    (line,) = re.findall(rf"^#Environment={variable}=(\d+)$", unit, re.M)
    assert Settings(check_every_s=float(line)).check_every_s == 86_400
    assert "check_every_s" in (ROOT / "docs/operate.md").read_text()
