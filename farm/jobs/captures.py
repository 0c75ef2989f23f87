"""The capture of a request's model: from the database, or made now and stored.

Torch is imported only if a model must be captured. If the database has a capture of the variant,
one query is enough."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from sqlmodel import Session, col, select

from farm.devices.software import torch_version
from farm.errors import CaptureError, UnknownOperator, UsageError, did_you_mean
from farm.models.resolved import ResolvedModel
from farm.requests.card_selection import CardLike
from farm.requests.memory import check_step_fits
from farm.requests.resolved import ResolvedRequest
from farm.store import captures, content, tables
from farm.store.database import Database, fetch
from farm.types.card_kind import card_kind_of, device_type_of
from farm.types.request import Request, named
from farm.types.variant import Variant

_log = logging.getLogger(__name__)


def checked_capture(database: Database, resolved: ResolvedRequest) -> int:
    """Return the id of the capture of a model, and check the operators of the request. Capture the
    model if the database has no capture. Raises `UnknownOperator` if none of the named operators is
    in the model; `CaptureError` if the model cannot be captured without gaps; `UsageError` if a
    training step needs more memory than a card has."""
    card = resolved.smallest_card
    if card is None:
        with database.read() as session:
            cards = fetch(session, tables.CardRow, resolved.card_ids).values()
        card = min(cards, key=lambda row: row.memory_bytes, default=None)
    device_type, torch = _device_and_torch(database, resolved.card_ids)
    capture_id = capture_for(
        database,
        resolved.request,
        device_type=device_type,
        torch=torch,
        card=card,
        model=resolved.model,
    )
    with database.read() as session:
        _check_operators(session, resolved.request, capture_id)
    return capture_id


def _check_operators(session: Session, request: Request, capture_id: int) -> None:
    """Raise `UnknownOperator` if the model has none of the operators that the request names."""
    names = named(request.operators)
    if not names:
        return
    of_pass = (
        select(tables.Operator.short_name)
        .join(tables.Call)
        .where(tables.Call.capture_id == capture_id)
    )
    operators = set(session.exec(of_pass))
    if not operators or operators.intersection(names):
        return
    similar = next(filter(None, (did_you_mean(name, operators) for name in names)), "")
    raise UnknownOperator(
        f"{request.title} has none of the operators {', '.join(names)}.",
        f"{similar} Its operators are {', '.join(sorted(operators))}.".strip(),
    )


def is_captured_first(resolved: ResolvedRequest) -> bool:
    """True if the model has to be captured before workers start: to check named operators, or the
    memory of a training step. Generated kernels belong to a card model, and the card may not be
    registered yet."""
    if named(resolved.request.operators):
        return True
    variant = resolved.variant
    return variant is not None and bool(variant.step or variant.generates_kernels)


def capture_all_layers(database: Database, resolved: ResolvedRequest) -> None:
    """If a request measures only some layers of a model, capture all layers: the report has a sum
    for all layers.
    """
    request, variant = resolved.request, resolved.variant
    if variant is None or not variant.layers or variant.generates_kernels:
        return
    # Do not run the model for its activation values: all layers together may not fit on any
    # machine.
    protocol = request.protocol.with_data("normal")
    all_layers = request.replace(variant=dataclasses.replace(variant, layers=0), protocol=protocol)
    device_type, torch = _device_and_torch(database, resolved.card_ids)
    try:
        capture_for(
            database, all_layers, device_type=device_type, torch=torch, model=resolved.model
        )
    except (CaptureError, UsageError) as error:
        _log.warning(
            "The report of %s will have no sum over all layers: %s", variant, error.message
        )


def _device_and_torch(database: Database, card_ids: Sequence[str]) -> tuple[str, str]:
    """Return (device type, torch version) for the capture. Cards that are not registered get this
    host's version.
    """
    first_id = card_ids[0] if card_ids else ""
    device_type = device_type_of(card_kind_of(first_id)) if first_id else "cpu"
    with database.read() as session:
        card = session.get(tables.CardRow, first_id)
        if card is None or not card.software_id or card.is_simulated:
            return device_type, torch_version()
        software = session.get(tables.SoftwareRow, card.software_id)
    return device_type, torch_version() if software is None else software.torch


def capture_for(
    database: Database,
    request: Request,
    *,
    device_type: str,
    torch: str,
    card: CardLike | None = None,
    model: ResolvedModel | None = None,
) -> int:
    """Return the id of the capture of the request's model. Capture the model if the database has no
    capture; a training step must fit in the memory of ``card``. ``model``: the request's model, if
    the caller has found it.

    Raises:
        CaptureError: the model cannot be captured without gaps.
        UsageError: a training step needs more memory than the card has.
        Unreadable: the request has a text whose token ids are neither in this process nor in the
            database.
    """
    variant, protocol = request.variant, request.protocol
    assert variant is not None, "a sweep has no capture"
    if variant.text:
        with database.write() as session:
            content.share_tokens(session, variant.text)
    like = tables.Capture(
        variant_id=variant.id,
        device_type=device_type,
        grad=protocol.grad,
        torch=torch,
        launch=protocol.launch,
        card_model=card.model if variant.generates_kernels and card is not None else "",
    )
    with database.read() as session:
        capture_id = captures.find_capture(session, like)
    if capture_id is None and variant.generates_kernels:
        # Only a card can list the kernels: the first item does, and the next round measures them.
        with database.write() as session:
            content.store_variant(session, variant)
            return captures.store_capture(session, (), like)
    if capture_id is None:
        from farm.training.extract import extract

        extraction = extract(variant, device_type=device_type, grad=protocol.grad, model=model)
        refusal = extraction.refusal(variant.model)
        if refusal is not None:
            raise refusal
        if card is not None:
            check_step_fits(variant, card, extraction.least_peak_bytes)
        with database.write() as session:
            capture_id = captures.store_extraction(session, variant, extraction, like)
    if protocol.data == "seen":
        _observe_values(database, capture_id, variant, model)
    return capture_id


def _observe_values(
    database: Database, capture_id: int, variant: Variant, model: ResolvedModel | None
) -> None:
    """Run the model once and store the activation values of each call, unless the database has
    them.
    """
    unseen = select(tables.Call.call_index).where(
        tables.Call.capture_id == capture_id, col(tables.Call.data).is_(None)
    )
    with database.read() as session:
        if session.exec(unseen).first() is None:
            return
        row = session.get(tables.ModelVariant, variant.id)
    from farm.training.observed_values import observe_values

    values = observe_values(variant, row.flops if row else 0, model)
    with database.write() as session:
        captures.store_values(session, capture_id, values or {})
