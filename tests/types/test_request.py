"""Requests as JSON: what is stored comes back, and their ids never change."""

import json

import pytest

from farm.errors import Unreadable
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request, Sweep
from farm.types.variant import Variant

SWEEP = Sweep(
    "Conv2d",
    {"in_channels": (64, 128), "kernel_size": (1, [3, 5], None), "zeros": (0, 0.5)},
    "kernels",
)
OF_A_MODEL = Request(
    variant=Variant("resnet18", 4, 224, dtype="float16"),
    protocol=Protocol(launch="eager", data="seen", tf32=True),
    stopping=Stopping(maximum_s=2.5),
    operators=("Conv2d", "add"),
    target=0.9,
    reuse="none",
)


@pytest.mark.parametrize(
    ("request_", "id_"),
    [
        (Request(sweep=SWEEP), "93ed4a32f90166ce471f0039328ea472"),
        (OF_A_MODEL, "4ba80ea826d1f4fe89da6a9473e18b6d"),
    ],
)
def test_a_stored_request_comes_back_under_the_id_it_always_had(request_, id_):
    stored = json.loads(json.dumps({**request_.to_json(), "cards": ["GPU-1"], "pinned": True}))
    assert Request.from_json(stored) == request_
    assert request_.id == id_


def test_a_protocol_of_a_later_version_is_not_taken_for_one_that_is_known():
    later = OF_A_MODEL.to_json()
    later["protocol"]["sparsity"] = 0.5
    with pytest.raises(Unreadable, match="sparsity"):
        Request.from_json(later)
