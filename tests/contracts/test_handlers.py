"""The contract of handlers (`farm.benchmark_process.handlers`), for every handler of this host."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from farm.addons.memory.requests import PlannedStepRequest, StepCaptureRequest, WireRequest
from farm.addons.memory.transfers import Move
from farm.benchmark_process import server
from farm.benchmark_process.handlers import Handler
from farm.benchmark_process.requests import (
    FingerprintRequest,
    MeasureRequest,
    ProcessRequest,
    TurnsRequest,
    VerifyRequest,
    from_json,
    to_json,
)
from farm.devices.host import find_card, open_device
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.benchmark.operators import linear

STEP = Variant("squeezenet1_1", 2, 32, step="training")
SUBJECT = Subject("variant", STEP.id, STEP.to_json())
EAGERLY = Protocol(launch="eager")
SMALL = linear(8, 16, 4)
SHORT = Stopping(warm_up_s=0.01, minimum_s=0.01, maximum_s=0.1)
#: A request of each kind. The test of a new handler is its example.
EXAMPLES: tuple[ProcessRequest, ...] = (
    MeasureRequest(SMALL, EAGERLY, SHORT),
    TurnsRequest((SMALL,), (EAGERLY,), (1,), SHORT),
    FingerprintRequest(),
    StepCaptureRequest(SUBJECT, EAGERLY),
    WireRequest(SUBJECT, EAGERLY),
    PlannedStepRequest(SUBJECT, EAGERLY, ("id",), ((0,),), ((Move(0, 1, 2, 3, 4),),)),
)
HANDLERS = server.registered_handlers()

every_handler = pytest.mark.parametrize(
    "handler", HANDLERS, ids=[handler.request.name for handler in HANDLERS]
)


def example_of(handler: Handler) -> ProcessRequest:
    (example,) = [request for request in EXAMPLES if type(request) is handler.request]
    return example


@pytest.fixture(scope="module")
def runner() -> server.TorchRunner:
    device = open_device(find_card(settings().cpu_card_id, settings()))
    return server.TorchRunner(device)


def test_no_two_handlers_answer_the_same_kind_of_request():
    names = [VerifyRequest.name, *(handler.request.name for handler in HANDLERS)]
    assert len(set(names)) == len(names)


@every_handler
def test_a_kind_of_request_is_a_frozen_dataclass_with_a_name(handler):
    kind = handler.request
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert kind.name.isidentifier()
    assert kind.doing[0].islower()
    assert kind.answer is not None


@every_handler
def test_a_request_survives_the_way_to_the_process(handler):
    request = example_of(handler)
    sent = json.loads(json.dumps(to_json(request)))
    assert not sent.keys() & {"request", "id"}
    assert from_json(type(request), sent) == request


@every_handler
def test_a_handler_answers_or_says_why_not(handler, runner):
    request = example_of(handler)
    try:
        answer = runner.answer(request, lambda phase, details: None)
    except Unmeasurable as error:
        refusal = error
    else:
        sent = json.loads(json.dumps(to_json(answer), allow_nan=False))
        assert from_json(request.answer, sent) == answer
        return
    assert refusal.reason in ("not_available", "rejected")
    assert refusal.message


def test_handlers_load_without_torch():
    code = (
        "import sys; from farm.benchmark_process.server import registered_handlers\n"
        "registered_handlers(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
