"""``farm cards``: the cards of this host and of the farm, and one card in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from cli import lists, output
from cli.options import AsJson
from cli.output import answer, say
from farm.errors import FarmUnavailable, NoSuchCard, UsageError


def cards(words: list[str] | None = None, as_json: AsJson = False, local: bool = False) -> None:
    """List the cards of this host and those that joined the farm; drain a card, or give it work
    again.
    """
    if words and words[0] in ("drain", "resume", "release"):
        if len(words) != 2:
            step = "Give the id of one card; `farm cards` lists the ids."
            raise UsageError(f"`farm cards {words[0]}` needs exactly one card.", step)
        say(_changed(*words))
        return
    if words and len(words) > 1:
        step = "Give one card to show, or an action (drain, resume or release) and one card."
        raise UsageError(f"'{words[0]}' is not an action of `farm cards`.", step)
    rows = _rows(local=local)
    if words:
        rows = _matching(rows, words[0])
    found = list(rows.values())
    full = map(details, found if words else ())
    answer(as_json, {"cards": found}, lambda: Group(lists.cards(found), *full))


def _rows(*, local: bool) -> dict[str, dict[str, Any]]:
    """The cards of this host, and unless `local` those in the database, by id."""
    from farm.devices.host import links_of
    from farm.jobs import listing
    from farm.jobs.cards import all_own_cards
    from farm.settings import settings

    rows: dict[str, dict[str, Any]] = {}
    for card in all_own_cards():
        state = {"state": "refused" if card.refusal else "here", "state_reason": card.refusal}
        rows[card.id] = {
            name: value for name, value in vars(card).items() if name != "refusal"
        } | state
        rows[card.id]["links"] = links_of(card)
    if local:
        return rows
    try:
        with output.open_database().read() as session:
            registered = listing.registered_cards(session, settings().heartbeat_s)
    except FarmUnavailable as error:  # the cards of this host can be listed without the farm
        say(f"The list has only the cards of this host. {error.message}")
        return rows
    for row in registered:
        here = rows.get(row["id"], {})
        # A card without a worker shows why this host's driver refuses it.
        if here.get("state") == "refused" and row["state"] in ("lost", "stopped"):
            row = {**row, "state": here["state"], "state_reason": here["state_reason"]}
        rows[row["id"]] = row
    return rows


def _matching(rows: dict[str, dict[str, Any]], word: str) -> dict[str, dict[str, Any]]:
    """The rows of the cards that a word selects. `NoSuchCard` if none matches."""
    from farm.devices.device import Card
    from farm.requests.card_selection import matching_cards

    names = ("id", "kind", "model", "memory_bytes", "index", "host")
    found = matching_cards(
        [Card(**{name: row[name] for name in names}) for row in rows.values()], word
    )
    if not found:
        raise NoSuchCard(f"There is no card '{word}'.", "List the cards with `farm cards`.")
    return {card.id: rows[card.id] for card in found}


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


_SOFTWARE = {"torch": "torch", "torchvision": "torchvision", "cuda": "CUDA", "cudnn": "cuDNN"}
_SOFTWARE |= {"driver": "driver", "python": "Python"}
_LEVELS = {
    "launch_floor_us": ("time between two kernels of a CUDA graph", "µs"),
    "idle_power_w": ("power at rest", "W"),
    "base_power_w": ("power at full clocks without work", "W"),
    "power_limit_w": ("power limit", "W"),
    "counter_tick_s": ("update period of the energy counter", "s"),
}


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


def lines(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value with unit) of everything that is known of the card, its fingerprint included."""
    from farm.devices.host import note_about

    refused, reason = row.get("state") == "refused", row.get("state_reason")
    found = [("model", str(row.get("model", ""))), ("driver", str(row.get("driver") or "-"))]
    note = note_about(str(row.get("kind")), found[0][1])
    if note:
        found.append(("note", note))
    if refused or reason:
        found.append(
            ("not usable", str(reason)) if refused else ("state", f"{row.get('state')}: {reason}")
        )
    if row.get("memory_bytes"):
        found.append(("memory", f"{row['memory_bytes'] / 2**30:.0f} GiB"))
    found += [(key, str(row[key])) for key in ("worker", "queue") if row.get(key)]
    if row.get("waiting") is not None:
        waiting = (
            f"{row['waiting']}; {row.get('deferred', 0)} of them wait for the reading of another "
            "item"
        )
        found += [
            ("items waiting", waiting),
            ("items measured in the last hour", str(row.get("done_last_hour", 0))),
        ]
    if software := row.get("software"):
        versions = [
            f"{name} {software[key]}" for key, name in _SOFTWARE.items() if software.get(key)
        ]
        versions += [software["platform"]] if software.get("platform") else []
        found.append(("software", f"{', '.join(versions)} ({software['id']})"))
    if row.get("capabilities"):
        found.append(("sensors", ", ".join(row["capabilities"])))
    fingerprint = row.get("fingerprint") or {}
    if not fingerprint:
        unknown = ("fingerprint", "not measured yet; the card's worker measures it when it starts")
        return found if refused else [*found, unknown]
    if rate := fingerprint.get("copy_bytes_per_s"):
        found.append(
            (
                "copy within its memory",
                f"{rate / 1e9:.0f} GB/s, counting bytes read and bytes written",
            )
        )
    for key, flops in (fingerprint.get("matmul_flops_per_s") or {}).items():
        name = "TF32" if key == "tf32" else key
        found.append((f"matrix product, {name}", f"{flops / 1e12:.3g} TFLOP/s"))
    found += [
        (name, f"{fingerprint[key]:.3g} {unit}")
        for key, (name, unit) in _LEVELS.items()
        if fingerprint.get(key)
    ]
    for key, name in (("power_instant", "instant power"), ("power_average", "averaged power")):
        if step := fingerprint.get(key):
            times = (
                f"50 % of the step after {step['lag_s']:.2f} s; rises from 10 to 90 % in "
                f"{step['rise_s']:.2f} s"
            )
            found.append((f"{name} sensor, after a step of the load", times))
    for key, load in (("base_w_per_c", "without work"), ("w_per_c", "under load")):
        if drift := fingerprint.get(key):
            value = f"{drift['value']:.1f} ± {drift['half_width']:.1f} W/°C"
            clear = drift["half_width"] < abs(drift["value"])
            found.append(
                (
                    f"rise of power with temperature, {load}",
                    value if clear else f"no clear effect ({value})",
                )
            )
    return found
