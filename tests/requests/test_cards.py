"""Which cards a word means."""

import pytest

from farm.devices.device import Card
from farm.errors import NoSuchCard
from farm.requests.card_selection import choose_cards


def card(card_id, kind="cuda", model="NVIDIA H200", index=0, host="alpha"):
    return Card(id=card_id, kind=kind, model=model, memory_bytes=0, index=index, host=host)


CARDS = [
    card("GPU-aaa1", index=0),
    card("GPU-aaa2", index=1),
    card("GPU-bbb1", model="NVIDIA A100", index=0, host="beta"),
    card("CPU-1", "cpu", "EPYC", 0),
]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([], ["GPU-aaa1", "GPU-aaa2"]),
        (["gpu-AAA2"], ["GPU-aaa2"]),
        (["GPU-a"], ["GPU-aaa1", "GPU-aaa2"]),
        (["cpu"], ["CPU-1"]),
        (["gpu"], ["GPU-aaa1", "GPU-aaa2", "GPU-bbb1"]),
        (["0"], ["GPU-aaa1", "GPU-bbb1"]),
        (["beta:0"], ["GPU-bbb1"]),
        (["a100"], ["GPU-bbb1"]),
        (["beta"], ["GPU-bbb1"]),
        (["1", "a100", "1"], ["GPU-aaa2", "GPU-bbb1"]),
    ],
)
def test_cards_are_chosen_by_any_of_their_names(wanted, chosen):
    assert [one.id for one in choose_cards(CARDS, wanted)] == chosen


@pytest.mark.parametrize("wanted", ["7", "h100x", "gamma:0", "", "alpha:x"])
def test_a_card_that_is_not_there_is_answered_with_those_that_are(wanted):
    with pytest.raises(NoSuchCard) as caught:
        choose_cards(CARDS, [wanted])
    assert caught.value.next_step
