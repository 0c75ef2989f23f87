"""Constants that were measured on the project's own cards have a unit, cards and a source."""

import pytest

from farm.benchmark.window import FIRST_STEP
from farm.types.measured_constants import MEASURED, MeasuredConstant
from farm.verdict.corrections import POWER_PER_C
from farm.verdict.gap_errors import BETWEEN_JOBS


@pytest.mark.parametrize("constant", MEASURED.values(), ids=MEASURED)
def test_a_constant_names_its_cards_and_its_source(constant: MeasuredConstant) -> None:
    assert constant.value > constant.half_width >= 0
    assert constant.unit
    assert constant.source
    assert set(constant.cards) <= {"NVIDIA H200", "NVIDIA H100"}


def test_verdicts_use_the_constants() -> None:
    assert BETWEEN_JOBS == {"time": 0.0163, "energy": 0.027, "power": 0.0245}
    assert (POWER_PER_C.value, POWER_PER_C.half_width) == (0.002, 0.0014)
    assert FIRST_STEP == 0.06


def test_a_constant_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        MEASURED["build"] = MEASURED["place"]  # type: ignore[index]
