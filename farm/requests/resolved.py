"""A complete request with its model and its cards: what one job will measure.

A command finds the model of a request one time, in `resolve` or before it. What follows (checks of
memory, capture, title, dry run, job) takes the model from the `ResolvedRequest`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from farm.errors import UsageError
from farm.models import catalog
from farm.models.resolved import ResolvedModel
from farm.requests.card_selection import CardLike
from farm.requests.partial_request import PartialRequest, complete
from farm.types.request import Request
from farm.types.variant import Variant


@dataclass(frozen=True)
class ResolvedRequest:
    """A request from which one job is created.

    Attributes:
        request: the variant (with the version of a user's model) or the sweep, the protocol and
            how precisely to measure.
        card_ids: the cards of the job, of one card model.
        model: the model of the variant; None for a sweep, and for a model outside the catalog.
        smallest_card: the card with the least memory; None: the job asks the registered cards.
        outside_title: the title of a model outside the catalog.
        where: file and line of the request, for messages; "" for the command line.
        alone: True if the command has only this request. Then a problem is an error; otherwise the
            request is refused, and the others are submitted.
        pinned: a person named the cards, and no other card measures items of the job.
        done_by: the id of a finished job of the same request; "" if there is none or the request
            reuses no readings.
        capture_id: the capture of the model; None: the job finds it, or captures the model.
    """

    request: Request
    card_ids: Sequence[str]
    model: ResolvedModel | None = None
    smallest_card: CardLike | None = None
    outside_title: str = ""
    where: str = ""
    alone: bool = True
    pinned: bool = False
    done_by: str = ""
    capture_id: int | None = None

    @classmethod
    def of(cls, request: Request, card_ids: Sequence[str]) -> ResolvedRequest:
        """Find the model of a complete request, which may be outside the catalog."""
        model = None
        if request.variant is not None:
            with contextlib.suppress(UsageError):
                model = catalog.resolve(request.variant.model)
        return cls(request, card_ids, model)

    @property
    def variant(self) -> Variant | None:
        return self.request.variant

    @functools.cached_property
    def title(self) -> str:
        """The title for people. That of a user's model has the sizes of its inputs, so its function
        runs: raises `SettingsError` if it cannot be built."""
        if self.outside_title:
            return self.outside_title
        if self.model is None or self.variant is None:
            return self.request.title
        return self.model.title_of(self.variant)

    @property
    def differences(self) -> list[str]:
        """Lines about what differs between a user's model and the measured one."""
        if self.model is None or self.variant is None:
            return []
        return self.model.differences(self.variant)


def resolve(
    partial: PartialRequest,
    cards: Sequence[CardLike],
    *,
    target: float,
    alone: bool = True,
    pinned: bool = False,
) -> ResolvedRequest:
    """Complete a request for cards of one card model. ``alone``, ``pinned``: see
    `ResolvedRequest`. Raises as `complete`."""
    model = partial.resolved
    if model is None and partial.model is not None:
        model = catalog.resolve_given(partial.model)
    return ResolvedRequest(
        complete(partial, cards[0].kind, target=target, model=model),
        [card.id for card in cards],
        model,
        smallest_card=min(cards, key=lambda card: card.memory_bytes),
        where=partial.where,
        alone=alone,
        pinned=pinned,
    )
