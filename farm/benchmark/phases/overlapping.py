"""The phase of overlap: a collective, and the matrix product that runs beside it, each alone."""

from __future__ import annotations

import contextlib
import dataclasses

from farm.benchmark.cache import InPlacePass
from farm.benchmark.passes import Passes
from farm.benchmark.phases.base import Measurement, Phase
from farm.benchmark.phases.restoring import time_restoring
from farm.benchmark.policies import POLICIES
from farm.benchmark.steady import silent
from farm.benchmark.workload import arrange
from farm.subjects.collective_calls import alone, product_beside
from farm.subjects.parsing import parse
from farm.types.details import Overlap
from farm.types.reading import Reading


class Overlapping(Phase):
    """`SeveralCards.overlap`, of a collective beside a matrix product."""

    name = "overlap"
    announced = False

    def applies(self, measurement: Measurement) -> bool:
        return bool(measurement.subject.spec.get("parameters", {}).get("beside"))

    def run(self, measurement: Measurement, reading: Reading) -> Reading:
        subject, torch_device = measurement.subject, measurement.torch_device
        spec = parse(subject.spec)
        product = product_beside(spec, torch_device)
        assert product is not None
        collective = dataclasses.replace(subject, spec=alone(spec).to_json())
        # Both stay in memory during both windows.
        first = measurement.build(collective)
        second = Passes(product, None, 0, 0)
        collective_us = _time_us(measurement, first)
        product_us = _time_us(measurement, second)
        overlap = Overlap.of(collective_us, product_us, reading.time_us.value)
        return reading.noting(cards=dataclasses.replace(reading.details.cards, overlap=overlap))


def _time_us(measurement: Measurement, passes: Passes) -> float:
    windows, protocol, stopping = measurement.windows, measurement.protocol, measurement.stopping
    policy = POLICIES["timed"]
    with contextlib.closing(arrange(passes, protocol, measurement.torch_device)) as workload:
        reading = windows.measure(workload, stopping, policy, silent)
        if isinstance(passes.first, InPlacePass):
            copies = time_restoring(windows, passes.first, protocol, stopping, policy)
            reading = reading.without(copies)
    return reading.time_us.value
