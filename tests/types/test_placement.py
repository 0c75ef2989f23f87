"""Words for what of a call lies in slow memory."""

import pytest

from farm.errors import UsageError
from farm.types.placement import MANY, Placement, configurations
from farm.types.protocol import Protocol
from farm.types.request import Request, Sweep
from farm.types.variant import Variant


@pytest.mark.parametrize("word", ["", "in0", "out0", "in0+out0", "in1-3+out0", "in0+in2+out1-2"])
def test_a_word_says_what_is_slow_and_comes_back(word):
    assert str(Placement.parse(word)) == word


@pytest.mark.parametrize(
    "word", ["in", "out0+in0", "in1+in0", "in0+in1", "in2-1", "in00", "slow", "in0+", "in0-9999999"]
)
def test_there_is_one_way_to_write_a_placement(word):
    with pytest.raises(UsageError, match="is not a placement"):
        Placement.parse(word)


def test_up_to_five_tensors_have_all_their_configurations():
    assert configurations([0, 1], 1, "all") == [
        *("in0", "in1", "out0", "in0-1", "in0+out0", "in1+out0", "in0-1+out0"),
    ]
    assert len(configurations(range(4), 1, "all")) == 31


def test_of_more_each_is_slow_alone_and_all_are():
    assert configurations(range(5), 1, "all") == [
        *(f"in{number}" for number in range(5)),
        "out0",
        "in0-4+out0",
    ]
    assert configurations([0, 2], 0, "each") == ["in0", "in2", "in0+in2"]
    assert configurations(range(MANY + 1), 0, "all") == [f"in0-{MANY}"]
    assert configurations([0], 0, "each") == ["in0"]
    assert configurations([0], 1, "none") == []


def test_protocols_and_requests_without_a_placement_keep_their_ids():
    assert Protocol().id == "e86ac19f77a85e249f75ca191947edf2"
    assert Protocol(placement="in0").id != Protocol().id
    assert Protocol.from_json(Protocol(placement="in0").to_json()) == Protocol(placement="in0")
    request = Request(sweep=Sweep("Linear", {"in_features": (16,)}))
    assert "placement" not in str(request.to_json())
    placed = request.replace(placements="each")
    assert placed.id != request.id
    assert Request.from_json(placed.to_json()).placements == "each"


def test_a_choice_that_there_is_not():
    with pytest.raises(UsageError, match="placements 'some' is unknown"):
        Request(sweep=Sweep("Linear", {}), placements="some")
    with pytest.raises(UsageError, match="A placement names the tensors of one tuple"):
        Request(variant=Variant("resnet18", 1, 64), protocol=Protocol(placement="in0"))
