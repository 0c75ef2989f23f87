"""Python imports this module in each process of a host of the soak test (PYTHONPATH).

It moves the clock of the host's processes by the number of seconds in the file SOAK_CLOCK. In a
benchmark process it also records each simulated measurement in the file SOAK_EXECUTIONS, for the
audit: real time, process, card, subject, "begin" or "end"."""

import os
import sys
import time

_real_time_s = time.time


def _stepped_s() -> float:
    try:
        with open(os.environ["SOAK_CLOCK"]) as file:
            return _real_time_s() + float(file.read() or 0)
    except (OSError, ValueError):
        return _real_time_s()


time.time = _stepped_s

if "farm.benchmark_process.server" in sys.orig_argv:
    from farm.devices import simulated

    _measure = simulated.measure

    def _record(device, subject, what: str) -> None:
        line = f"{_real_time_s():.6f} {os.getpid()} {device.card.id} {subject.id} {what}\n"
        file = os.open(os.environ["SOAK_EXECUTIONS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())  # one call, so that lines of several processes do not mix
        finally:
            os.close(file)

    def _recorded(subject, protocol, device, *rest):
        _record(device, subject, "begin")
        reading = _measure(subject, protocol, device, *rest)
        _record(device, subject, "end")
        return reading

    simulated.measure = _recorded
