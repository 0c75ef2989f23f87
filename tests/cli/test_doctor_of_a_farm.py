"""`farm doctor` beside a running farm: its workers answer."""

import json


def test_workers_tell_what_they_run(one_card):
    running_farm, _ = one_card.whole()
    checks = json.loads(running_farm.say("doctor", "--json").stdout)["checks"]
    told = {check["name"]: (check["level"], check["message"]) for check in checks}
    assert told["workers"] == ("ok", "1 card worker and 1 control worker listen to the broker")
    assert told["programs"] == (
        "ok",
        "the same versions of farm, torch, torchvision, Python here and on all workers that answer",
    )
