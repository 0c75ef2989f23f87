"""`farm doctor` beside a running farm: its workers answer."""

import json
import signal

from tests import slow


def test_workers_tell_what_they_run(one_card):
    running_farm, _ = one_card.whole()
    checks = json.loads(running_farm.say("doctor", "--json").stdout)["checks"]
    told = {check["name"]: (check["level"], check["message"]) for check in checks}
    assert [told[name][0] for name in ("workers", "programs")] == ["ok", "ok"]
    assert "1 card worker and 1 control worker" in told["workers"][1]
    assert "Python here and on all workers" in told["programs"][1]


@slow.FAULT
def test_a_supervisor_that_is_stopped_or_was_killed_is_a_problem(one_card):
    farm, _ = one_card.whole()
    assert told(farm, "problem") == {}
    farm.worker.send_signal(signal.SIGSTOP)
    try:
        ((name, message),) = told(farm, "problem").items()
    finally:
        farm.worker.send_signal(signal.SIGCONT)
    assert name.startswith("supervisor ")
    assert "is stopped (SIGSTOP or Ctrl-Z)" in message
    assert told(farm, "problem") == {}

    farm.worker.kill()
    farm.worker.wait()
    farm.wait_for(lambda: not farm.alive() and not farm.processes("tasks.main"))
    ((_, message),) = told(farm, "problem").items()
    assert "its supervisor (`farm worker`) ended unexpectedly" in message
    farm.worker = farm.start("worker")
    farm.wait_for(farm.alive)
    assert told(farm, "problem") == {}


def told(farm, level):
    said = farm.say("doctor", "--json")
    found = json.loads(said.stdout)
    assert said.returncode == (1 if found["counts"]["problem"] else 0)
    return {check["name"]: check["message"] for check in found["checks"] if check["level"] == level}
