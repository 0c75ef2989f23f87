"""``farm cards``: the cards of this host and of the farm, and one card in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from cli import lists, output
from cli.options import AsJson
from cli.output import answer, say
from farm.errors import UsageError


def cards(words: list[str] | None = None, as_json: AsJson = False, local: bool = False) -> None:
    """List the cards of this host and those that joined the farm; drain a card, or give it work
    again.
    """
    from farm.jobs import card_list

    if words and words[0] in ("drain", "resume", "release"):
        if len(words) != 2:
            step = "Give the id of one card; `farm cards` lists the ids."
            raise UsageError(f"`farm cards {words[0]}` needs exactly one card.", step)
        say(_changed(*words))
        return
    if words and len(words) > 1:
        step = "Give one card to show, or an action (drain, resume or release) and one card."
        raise UsageError(f"'{words[0]}' is not an action of `farm cards`.", step)
    rows = card_list.own_rows() if local else card_list.all_rows(say)
    if words:
        rows = card_list.matching_rows(rows, words[0])
    shown = list(rows.values())
    full = map(details, shown if words else ())
    answer(as_json, {"cards": shown}, lambda: Group(lists.cards(shown), *full))


def _changed(action: str, name: str) -> str:
    """Drain, resume or release a card. Returns what happened."""
    from farm.jobs import cards

    database = output.open_database()
    with database.read() as session:
        card = cards.find(session, name)
    if action == "release":
        if not cards.resume(database, card.id, quarantined=True):
            return f"{card.id} was not in quarantine."
        if cards.stored_state(database, card.id) == "starting":
            return (
                f"{card.id} is released. Its worker now checks the card, which takes items again "
                "if it is healthy."
            )
        return (
            f"{card.id} is released. It takes items again after its worker has started and found "
            "it healthy."
        )
    if action == "resume":
        if card.state == "quarantined":
            step = (
                f"Correct the cause, then end the quarantine with `farm cards release {card.id}`."
            )
            raise UsageError(f"{card.id} is quarantined: {card.state_reason}", step)
        resumed = cards.resume(database, card.id)
        return f"{card.id} takes items again." if resumed else f"{card.id} was not draining."
    if card.state == "quarantined":
        return (
            f"{card.id} is not drained: it is quarantined and takes no items. Reason: "
            f"{card.state_reason}"
        )
    cards.drain(database, card.id, "drained by a person")
    return (
        f"{card.id} is draining. It finishes its current item; its other items move to cards of "
        "the same model, or "
        f"wait. `farm cards resume {card.id}` gives the card work again."
    )


_SOFTWARE = {
    "torch": "torch",
    "torchvision": "torchvision",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "driver",
    "python": "Python",
}
_LEVELS = {
    "launch_floor_us": ("time between two kernels of a CUDA graph", "µs"),
    "idle_power_w": ("power at rest", "W"),
    "base_power_w": ("power at full clocks without work", "W"),
    "power_limit_w": ("power limit", "W"),
    "counter_tick_s": ("update period of the energy counter", "s"),
}
_SENSORS = {"power_instant": "instant power", "power_average": "averaged power"}
_DRIFTS = {"base_w_per_c": "without work", "w_per_c": "under load"}

Lines = list[tuple[str, str]]  # name and value with unit


def details(row: Mapping[str, Any]) -> Table:
    """One card in full, as a table of two columns. Keys: those of
    `farm.jobs.listing.registered_cards`.
    """
    table = Table(
        box=None, show_header=False, padding=(0, 2), title=str(row["id"]), title_justify="left"
    )
    for name, value in lines(row):
        table.add_row(name, value)
    return table


def lines(row: Mapping[str, Any]) -> Lines:
    """Everything that is known of the card, its fingerprint included."""
    described = _description(row)
    if fingerprint := row.get("fingerprint"):
        return described + _fingerprint(fingerprint)
    if row.get("state") == "refused":
        return described
    not_yet = "not measured yet; the card's worker measures it when it starts"
    return [*described, ("fingerprint", not_yet)]


def _description(row: Mapping[str, Any]) -> Lines:
    from farm.jobs.card_list import note_on

    state, reason = row.get("state"), row.get("state_reason")
    described = [("model", str(row.get("model", ""))), ("driver", str(row.get("driver") or "-"))]
    if note := note_on(row):
        described.append(("note", note))
    if state == "refused":
        described.append(("not usable", str(reason)))
    elif reason:
        described.append(("state", f"{state}: {reason}"))
    if row.get("memory_bytes"):
        described.append(("memory", f"{row['memory_bytes'] / 2**30:.0f} GiB"))
    described += [(key, str(row[key])) for key in ("worker", "queue") if row.get(key)]
    if row.get("waiting") is not None:
        deferred = row.get("deferred", 0)
        waiting = f"{row['waiting']}; {deferred} of them wait for the reading of another item"
        described.append(("items waiting", waiting))
        described.append(("items measured in the last hour", str(row.get("done_last_hour", 0))))
    if software := row.get("software"):
        described.append(("software", _software(software)))
    if row.get("capabilities"):
        described.append(("sensors", ", ".join(row["capabilities"])))
    return described


def _software(software: Mapping[str, Any]) -> str:
    versions = [f"{name} {software[key]}" for key, name in _SOFTWARE.items() if software.get(key)]
    if software.get("platform"):
        versions.append(software["platform"])
    return f"{', '.join(versions)} ({software['id']})"


def _fingerprint(fingerprint: Mapping[str, Any]) -> Lines:
    measured = []
    if rate := fingerprint.get("copy_bytes_per_s"):
        copy = f"{rate / 1e9:.0f} GB/s, counting bytes read and bytes written"
        measured.append(("copy within its memory", copy))

    for dtype, flops in (fingerprint.get("matmul_flops_per_s") or {}).items():
        name = "TF32" if dtype == "tf32" else dtype
        measured.append((f"matrix product, {name}", f"{flops / 1e12:.3g} TFLOP/s"))

    for key, (name, unit) in _LEVELS.items():
        if fingerprint.get(key):
            measured.append((name, f"{fingerprint[key]:.3g} {unit}"))

    for key, name in _SENSORS.items():
        if step := fingerprint.get(key):
            times = (
                f"50 % of the step after {step['lag_s']:.2f} s; rises from 10 to 90 % in "
                f"{step['rise_s']:.2f} s"
            )
            measured.append((f"{name} sensor, after a step of the load", times))

    for key, load in _DRIFTS.items():
        if drift := fingerprint.get(key):
            rise = f"{drift['value']:.1f} ± {drift['half_width']:.1f} W/°C"
            if drift["half_width"] >= abs(drift["value"]):
                rise = f"no clear effect ({rise})"
            measured.append((f"rise of power with temperature, {load}", rise))
    return measured
