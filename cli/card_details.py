"""One card in full: what its driver tells, and the fingerprint that was taken when a worker first saw it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

_RATES = {"float32": "float32", "tf32": "TF32", "float16": "float16", "bfloat16": "bfloat16"}


def render(row: Mapping[str, Any]) -> Table:
    """A table of two columns. Keys: those of `farm.jobs.listing.registered_cards`."""
    table = Table(box=None, show_header=False, padding=(0, 2), title=str(row["id"]), title_justify="left")
    for name, value in lines(row):
        table.add_row(name, value)
    return table


def _software(row: Mapping[str, Any]) -> str:
    """Everything that is known of it, with the id under which readings are kept apart."""
    named = (
        ("torch", "torch"),
        ("torchvision", "torchvision"),
        ("CUDA", "cuda"),
        ("cuDNN", "cudnn"),
        ("driver", "driver"),
        ("Python", "python"),
    )
    told = [f"{name} {row[key]}" for name, key in named if row.get(key)]
    return f"{', '.join([*told, str(row.get('platform') or '')]).rstrip(', ')} ({row['id']})"


def lines(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known of the card, each with its unit."""
    found = [("model", str(row.get("model", ""))), ("driver", str(row.get("driver") or "-"))]
    if row.get("state") == "refused":
        found.append(("left out", str(row.get("state_reason"))))
    elif row.get("state_reason"):
        found.append(("state", f"{row.get('state')}: {row['state_reason']}"))
    if row.get("memory_bytes"):
        found.append(("memory", f"{row['memory_bytes'] / 2**30:.0f} GiB"))
    if row.get("worker"):
        found.append(("worker", str(row["worker"])))
    if row.get("queue"):
        found.append(("queue", str(row["queue"])))
    if row.get("waiting") is not None:
        told = f"{row['waiting']}, {row.get('deferred', 0)} of them for a reading that another item takes"
        found += [("items waiting", told), ("items measured in the last hour", str(row.get("done_last_hour", 0)))]
    if software := row.get("software"):
        found.append(("software", _software(software)))
    if row.get("capabilities"):
        found.append(("sensors", ", ".join(row["capabilities"])))
    taken = row.get("fingerprint") or {}
    if not taken and row.get("state") == "refused":
        return found
    if not taken:
        return [*found, ("fingerprint", "not taken yet; the card's next worker takes it")]
    if rate := taken.get("copy_bytes_per_s"):
        found.append(("copying", f"{rate / 1e9:.0f} GB/s, read and written"))
    for key, flops in (taken.get("matmul_flops_per_s") or {}).items():
        found.append((f"matrix product, {_RATES.get(key, key)}", f"{flops / 1e12:.3g} TFLOP/s"))
    for key, name, unit in (
        ("launch_floor_us", "between two kernels of a graph", "us"),
        ("idle_power_w", "power at rest", "W"),
        ("base_power_w", "power at full clocks with nothing to do", "W"),
        ("power_limit_w", "power limit", "W"),
        ("counter_tick_s", "the energy counter ticks every", "s"),
    ):
        if taken.get(key):
            found.append((name, f"{taken[key]:.3g} {unit}"))
    for key, name in (("power_instant", "instant power"), ("power_average", "averaged power")):
        if answer := taken.get(key):
            found.append(
                (
                    f"{name} after a step",
                    f"half way after {answer['lag_s']:.2f} s, 10 to 90 % in {answer['rise_s']:.2f} s",
                )
            )
    for key, name in (
        ("base_w_per_c", "power for a degree more, with nothing to do"),
        ("w_per_c", "power for a degree more, under load"),
    ):
        if warm := taken.get(key):
            told = f"{warm['value']:.1f} ± {warm['half_width']:.1f} W"
            if warm["half_width"] >= abs(warm["value"]):
                told = f"not told apart from none ({told})"
            found.append((name, told))
    return found
