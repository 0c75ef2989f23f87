"""The thread that renews leases during a measurement."""

from __future__ import annotations

import threading

from farm.jobs.own_card import heartbeat


def test_no_lease_is_renewed_after_the_end_of_a_measurement(monkeypatch):
    monkeypatch.setenv("FARM_LEASE_S", "3")
    begun, may_go_on = threading.Event(), threading.Event()
    renewed = []

    def renew():
        begun.set()
        may_go_on.wait(10)
        renewed.append("lease")

    with heartbeat(renew):
        assert begun.wait(10)
        threading.Timer(0.2, may_go_on.set).start()

    assert renewed == ["lease"]
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
