"""A language model with the caller's own text: ids are made here, stored, and passed to the
measuring process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlmodel import select

import farm
from farm.errors import Unreadable
from farm.jobs.create import open_job
from farm.requests.resolved import ResolvedRequest
from farm.settings import user_models
from farm.store.content import find_tokens, store_variant
from farm.store.tables import TokenInput
from farm.types.protocol import Protocol
from farm.types.request import Request
from tests import slow
from tests.own_text import write_own_text
from tests.planned import claim, items_of, register

SHORT = farm.Stopping(
    warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1, time_half_width=1.0, energy_half_width=1.0
)


@pytest.fixture
def variant(tmp_path: Path) -> farm.Variant:
    pytest.importorskip("tokenizers")
    text, tokenizer = write_own_text(tmp_path)
    return farm.variant("bert-base", 2, length=8, layers=1, text=text, tokenizer=tokenizer)


@slow.PROCESS
def test_it_is_measured_by_a_process_that_was_handed_the_ids(
    variant: farm.Variant, tmp_path: Path
) -> None:
    database = farm.open_database(tmp_path / "farm.db")
    how = Protocol(launch="eager", data="seen")
    report = farm.measure_model(
        variant,
        database=database,
        card="cpu",
        protocol=how,
        stopping=SHORT,
        operators=("Embedding",),
    )
    items = items_of(database, report.report.job_id)
    assert {item.role: (item.state, item.message) for item in items if item.role != "canary"} == {
        "tuple": ("done", ""),
        "whole": ("done", ""),
    }
    assert variant.text[:8] in report.report.title


def test_workers_find_the_ids_in_the_database(
    any_database: farm.Database, variant: farm.Variant
) -> None:
    cards = register(any_database, 0)
    ids = user_models.text(variant.text)
    opened = open_job(
        any_database,
        ResolvedRequest.of(
            Request(variant=variant, protocol=Protocol(launch="eager", data="seen")), cards
        ),
    )
    with any_database.read() as session:
        assert find_tokens(session, variant.text) == ids
    (whole,) = items_of(any_database, opened.job_id, "whole")
    assert claim(any_database, whole).work.subject.tokens == ids.to_json()

    user_models.forget_texts()  # another process takes it apart, for another kind of card
    open_job(
        any_database,
        ResolvedRequest.of(
            Request(variant=variant, protocol=Protocol(launch="graph", data="seen")), cards
        ),
    )
    assert user_models.text(variant.text) == ids


def test_a_variant_of_another_farm_whose_ids_are_not_here_is_refused_when_it_is_to_run(
    database: farm.Database, variant: farm.Variant
) -> None:
    user_models.forget_texts()
    with database.write() as session:
        store_variant(session, variant)  # as an import does
    with pytest.raises(Unreadable, match="the text with the token ids") as caught:
        open_job(database, ResolvedRequest.of(Request(variant=variant), register(database, 0)))
    assert "with its text" in caught.value.next_step
    with database.read() as session:
        assert not session.exec(select(TokenInput.id)).all()


def test_an_item_whose_ids_were_lost_is_refused_with_the_reason(
    database: farm.Database, variant: farm.Variant
) -> None:
    opened = open_job(
        database,
        ResolvedRequest.of(
            Request(variant=variant, protocol=Protocol(launch="eager")), register(database, 0)
        ),
    )
    with database.write() as session:
        session.delete(session.get_one(TokenInput, variant.text))
    claim(database, *items_of(database, opened.job_id, "whole"))
    (whole,) = items_of(database, opened.job_id, "whole")
    assert (whole.state, whole.reason) == ("failed", "rejected")
    assert "the text with the token ids" in whole.message
