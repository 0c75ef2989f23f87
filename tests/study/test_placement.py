"""The study of tensors in slow memory: many calls a run against one a run."""

import pytest

from benchmarks.studies import in_situ
from benchmarks.studies.conditions import placement
from benchmarks.studies.laboratory import StudyOptions
from farm.errors import FarmError
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.addons.memory.test_in_situ import CPU, Fake

VARIANT = Variant("squeezenet1_1", 1, 32)


class Bench:
    """A laboratory whose process is this one."""

    def in_situ(self, variant, most):
        subject = Subject("variant", variant.id, variant.to_json())
        return in_situ.compare(subject, Protocol(launch="eager"), CPU, most)


def test_both_ways_are_held_against_each_other_and_the_runs_counted(monkeypatch):
    monkeypatch.setattr(in_situ, "slow_memory_of", lambda device: Fake())
    found = placement(Bench(), StudyOptions(VARIANT, quick=True, tuples=8))
    assert 1 <= len(found.rows) <= 8
    for row in found.rows:
        assert row["alone_time_us"] > 0
        assert row["change"] == row["together_time_us"] / row["alone_time_us"] - 1
    assert found.notes[0].startswith("8 runs that change one call took ")
    assert "relative to one: median " in found.notes[1]
    assert found.drawable


def test_a_card_without_slow_memory_is_refused_in_a_line():
    with pytest.raises(FarmError, match="NUMA node"):
        in_situ.compare(
            Subject("variant", VARIANT.id, VARIANT.to_json()), Protocol(launch="eager"), CPU, 1
        )
