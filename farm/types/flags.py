"""What the flags of a reading say, for people who meet one in a report; `docs/method.md` has the same words."""

from __future__ import annotations

FLAGS: dict[str, str] = {
    "not_converged": "the ceiling came before the wanted interval",
    "few_passes": "fewer than three rounds: the interval is as wide as the figure",
    "no_energy": "the card tells no power: time only",
    "lesser_power_source": "power from samples instead of the energy counter",
    "power_disagrees": "counter and integrated instant power differ by more than 2 %",
    "drifting": "power of the window's halves differs by more than 3 %, repeated and still so",
    "starved": "the card waited for the host for more than 0.5 % of the window, repeated and still so",
    "unsettled": "the temperature still rose or fell when the window had to open, or the wait was too short to tell",
    "lacks_sensors": "the card does not tell something that a reading is judged by (lacks in the details): processes, throttle reasons, temperature, clock, instant power",
    "not_cold": "under stream: there are too few copies to exceed the cache",
    "values_moved": "the operator writes its input, and the values there grew, shrank or overflowed from pass to pass",
    "canary_off": "the reference operator had changed by more than 3 % when this was read; in a report also: by the next time it was read",
    "throttled_power": "the power cap lowered the clocks; a burst reading stands beside it",
    "throttled_thermal": "lowered for heat, repeated and still so",
    "throttled_other": "hardware slowdown, power brake or sync boost",
    "shared": "another process computed on the card",
    "busy_host": "on a CPU: other processes had more than 10 % of the cores' time in the window (foreign_cpu_share in the details of every reading on a CPU whose kernel tells). Of a GPU this is not looked at: a host too busy to feed it shows as starved",
    "study": "taken by farm study, under its own conditions; never reused",
    "simulated": "not a measurement at all; never reused",
}
