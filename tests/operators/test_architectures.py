"""Models of tokens, images and sounds of other sources are extracted completely, as
docs/results/architectures.md tells."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from farm.models import catalog
from farm.operators.cost import model_flops
from farm.training.extract import extract
from farm.types.variant import Variant
from tests import slow

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "architectures.jsonl"
#: A model of each kind that the catalog knows, cut where that is possible.
KINDS = [
    catalog.variant("bert-base", 2, length=16, layers=2),
    catalog.variant("gpt2", 2, phase="decode", cache=32, layers=2, dtype="bfloat16"),
    catalog.variant("openai-gpt", 2, length=16, layers=2),
    catalog.variant("openai-gpt-double-heads", 2, length=16, layers=2),
    catalog.variant("t5-small", 2, length=16, layers=2),
    catalog.variant("t5-small", 2, length=16, layers=2, phase="encode"),
    catalog.variant("clip-vit-base", 2),
    catalog.variant("vit-base", 2, layers=2),
    catalog.variant("wav2vec2-base", 2, length=16000, layers=2),
    catalog.variant("whisper-base-encoder", 2, layers=2),
]
#: In these some layers look further back than the others: every sixth, every third.
LAYERS_DIFFER = {"gemma-3-1b": 6, "modernbert-base": 3}


def listed() -> list[dict]:
    """What the table says to be extracted."""
    return [row for row in map(json.loads, RESULTS.read_text().splitlines()) if not row["reason"]]


@pytest.mark.parametrize("variant", KINDS, ids=str)
def test_a_model_of_each_kind_is_extracted_completely(variant: Variant) -> None:
    found = extract(variant, device_type="cuda")
    assert found.refusal(variant.model) is None
    assert found.flops == found.model_flops > 0


@slow.ALIKE
@pytest.mark.parametrize("row", listed(), ids=lambda row: row["title"])
def test_an_architecture_is_extracted_as_the_table_tells(row: dict) -> None:
    variant = Variant.from_json(row["variant"])
    assert variant.id == row["id"]
    depth = catalog.find(variant.model).depth
    if depth < 3:
        assert flops_of(variant) == row["flops"]
    elif variant.model in LAYERS_DIFFER:
        flops_of(dataclasses.replace(variant, layers=LAYERS_DIFFER[variant.model]))
        assert counted(variant) == row["flops"]
    else:  # what a layer more costs, each costs
        one = counted(dataclasses.replace(variant, layers=1))
        two = flops_of(dataclasses.replace(variant, layers=2))
        assert one + (depth - 1) * (two - one) == row["flops"]


def flops_of(variant: Variant) -> int:
    """Of one pass, by the sum of its operators and by PyTorch's own count of the whole."""
    found = extract(variant, device_type="cuda")
    assert found.refusal(variant.model) is None
    assert found.flops == found.model_flops
    return found.flops


def counted(variant: Variant) -> int:
    """Of one pass, by PyTorch's own count alone: an extraction takes five times as long."""
    model, inputs = (
        catalog.build(variant, device="meta"),
        catalog.resolve(variant.model).meta_inputs(variant),
    )
    return model_flops(model, inputs)


def test_the_layers_of_a_decoder_are_the_same_few_tuples() -> None:
    few, many = (
        extract(
            catalog.variant("gpt2", phase="decode", cache=32, layers=layers), device_type="cuda"
        )
        for layers in (2, 4)
    )
    assert len(many.capture.calls) > 1.5 * len(few.capture.calls)
    assert len(many.capture.tuples) == len(few.capture.tuples)
