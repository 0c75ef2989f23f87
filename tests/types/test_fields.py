"""One declaration of a field is enough for its validation, JSON, id, column, option and key."""

from dataclasses import dataclass

import pytest

from farm.addons.memory.memory_options import MemoryOptions
from farm.errors import UsageError
from farm.requests.measurement_file import parse
from farm.requests.partial_request import GIVEN, VARIANT, PartialRequest, TextFiles
from farm.store.data_columns import VARIANT as VARIANT_COLUMNS
from farm.store.tables import ModelVariant
from farm.types.fields import ContentAddressed, declared, fields_of, names_of, original, texts
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request
from farm.types.variant import Variant


@dataclass(frozen=True)
class Before(ContentAddressed):
    size: int = original(1, "the size", option="--size", minimum=1)


@dataclass(frozen=True)
class After(Before):
    shape: str = declared(
        "", "the shape", option="--shape", usual="round", choices=("", "round", "square")
    )


def test_a_new_field_at_its_default_changes_no_json_and_no_id():
    assert After().to_json() == Before().to_json() == {"size": 1}
    assert After().id == Before().id
    assert After(shape="square").to_json() == {"size": 1, "shape": "square"}


def test_a_value_that_is_not_accepted_is_named_with_what_is():
    with pytest.raises(UsageError, match="shape 'flat' is unknown") as caught:
        After(shape="flat")
    assert caught.value.next_step == "Choose one of round, square."
    with pytest.raises(UsageError, match="size is 0; it must be from 1"):
        After(size=0)


def test_the_help_is_made_of_the_declaration():
    assert fields_of(After)[1].help == "The shape. Default: round."


def test_every_field_that_users_give_has_its_texts_in_the_file():
    records = {
        kind.__name__: kind
        for kind in (Variant, Protocol, Stopping, Request, TextFiles, MemoryOptions)
    }
    assert {name: tuple(found) for name, found in texts().items()} == {
        name: names_of(kind) for name, kind in records.items()
    }, "one table for each field, in their order"
    assert all(one.description for kind in records.values() for one in fields_of(kind))
    batch = next(one for one in fields_of(Variant) if one.name == "batch")
    assert batch.option == ("-b", "--batch")
    assert batch.help.startswith("Batch size. Default: depends on the card.")


def test_every_field_of_a_variant_is_a_column_in_the_database_and_in_exports():
    names = {one.name for one in fields_of(Variant)}
    assert names <= set(ModelVariant.__table__.columns.keys())
    assert names - {"dtype"} <= {column.name for column in VARIANT_COLUMNS}
    assert names - VARIANT.keys() == {"model", "version"}, (
        "one is named on its own, the other computed"
    )


def test_every_given_field_is_a_key_of_a_measurement_file():
    (request,) = parse(
        "- {model: a, batch: 2, step: training, protocol: {tf32: true}, stopping: {maximum_s: 1}}",
        "a.yml",
    )
    assert request.given == {
        "model": "a",
        "batch": 2,
        "step": "training",
        "tf32": True,
        "maximum_s": 1.0,
    }
    with pytest.raises(TypeError, match="not fields of a request: shape"):
        PartialRequest(shape="round")
    assert "shape" not in GIVEN
