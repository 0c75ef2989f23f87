"""Generated kernels are predicted from the bytes that they move, with intervals from families that
were left out."""

from __future__ import annotations

import dataclasses
import math

import pytest

from farm.addons.predict.calibration import UNSEEN
from farm.addons.predict.compiled_models import compiled_predictor
from farm.addons.predict.generated_kernels import (
    CompiledPredictor,
    KernelReading,
    LearnedKernels,
    kernel_readings,
    traffic_us,
    without_family,
)
from farm.addons.predict.stored_predictor import (
    CallPrediction,
    PredictedCost,
    PredictedValue,
    Predictions,
)
from farm.exchange.packaged import packaged_database
from farm.types.tuple import NeededTuple
from tests.addons.predict.made_up import H200

MIB = 1 << 20


def reading(number: int, family: str, factor: float, kind: str = "pointwise") -> KernelReading:
    bytes_moved = (number + 1) * 8 * MIB
    return KernelReading(
        f"{family}{number}", kind, bytes_moved, factor * traffic_us(H200, bytes_moved), 400.0,
        {family: 2},
    )  # fmt: skip


def readings() -> list[KernelReading]:
    found = []
    for family, factor in (("gpt", 1.0), ("vit", 1.1), ("vgg", 1.2), ("opt", 1.3), ("t5", 1.5)):
        found += [reading(number, family, factor) for number in range(4)]
        found.append(reading(9, family, 2 * factor, "reduction"))
    return found


def test_each_kind_has_the_median_factor_over_the_time_of_its_traffic() -> None:
    learned = LearnedKernels.of(readings(), H200)
    assert learned is not None
    assert learned.factors["pointwise"] == pytest.approx(1.2)
    assert learned.factors["reduction"] == pytest.approx(2.4)
    assert learned.time_us(H200, "pointwise", 8 * MIB) == pytest.approx(
        1.2 * traffic_us(H200, 8 * MIB)
    )
    assert set(learned.families) == {"gpt", "vit", "vgg", "opt", "t5"}


def test_a_family_has_one_vote_however_many_kernels_it_has() -> None:
    many = [*readings(), *(reading(number, "gpt", 5.0) for number in range(20, 60))]
    learned = LearnedKernels.of(many, H200)
    assert learned is not None
    assert learned.factors["pointwise"] < 1.5


def test_the_intervals_are_the_errors_of_families_that_were_left_out() -> None:
    learned = LearnedKernels.of(readings(), H200)
    assert learned is not None
    # The worst is t5 (1.5): without it, the median is 1.1 or 1.2.
    assert math.log(1.5 / 1.2) < learned.time_error < math.log(1.5 / 1.1)
    assert math.log(1.5 / 1.2) < learned.sum_time_error < math.log(1.5 / 1.1)
    assert LearnedKernels.of([], H200) is None
    alone = LearnedKernels.of(readings()[:5], H200)
    assert alone is not None
    assert alone.sum_time_error == math.inf, "nothing says how wrong it is"


def test_what_a_family_has_is_not_used_for_it() -> None:
    shared = dataclasses.replace(readings()[0], calls={"gpt": 1, "vit": 1})
    kept = without_family([*readings(), shared], "gpt")
    assert not [one for one in kept if one.operator_id.startswith("gpt")]
    assert len(kept) == 20


@dataclasses.dataclass(frozen=True)
class Libraries:
    """A predictor of library calls: each takes 10 us and 2 mJ."""

    name = "best"
    software = None
    method = 5

    def predict(self, wanted: list[NeededTuple], model: list[NeededTuple]) -> Predictions:
        assert all(entry.spec["kind"] != "kernel" for entry in (*wanted, *model))
        call = CallPrediction(PredictedValue(10.0, 8.0, 12.5), PredictedValue(2.0, 1.6, 2.5))
        number = sum(entry.all_calls for entry in wanted)
        total = PredictedCost(call.time_us.times(number), call.energy_mj.times(number))
        return Predictions((call,) * len(wanted), total)


def needed(name: str, kind: str, bytes_moved: int, calls: int) -> NeededTuple:
    return NeededTuple(
        f"{name}{bytes_moved}", name, name, 0, bytes_moved, {"": calls}, {"kind": kind}
    )


def test_a_compiled_model_is_the_sum_of_its_kernels_and_library_calls() -> None:
    learned = LearnedKernels.of(readings(), H200)
    predictor = CompiledPredictor(Libraries(), learned, H200, ("a note",))
    wanted = [
        needed("pointwise", "kernel", 8 * MIB, 3),
        needed("mm", "aten", MIB, 2),
        needed("unheard_of", "kernel", 8 * MIB, 1),
    ]
    predicted = predictor.predict(wanted, wanted)
    first, product, last = predicted.calls
    assert product.time_us.value == 10.0
    assert (first.known, last.known) == (True, False)
    assert first.time_us.low < first.time_us.value < first.time_us.high
    total = 3 * first.time_us.value + 20.0 + last.time_us.value
    assert predicted.total.time_us.value == pytest.approx(total)
    assert predicted.total.time_us.low == pytest.approx(
        16.0 + (total - 20.0) / math.exp(learned.sum_time_error)
    )
    assert predicted.total.energy_mj.value > 4.0
    assert predicted.notes == ("a note",)
    # An interval per call, times its calls: 2 x 4.5 us of the product are the widest.
    assert predicted.narrowing[0] == 1

    only = predictor.predict(wanted[:1], wanted)
    assert only.total.time_us.value == pytest.approx(3 * first.time_us.value)


def test_another_card_gets_the_same_factors_and_wider_intervals() -> None:
    learned = LearnedKernels.of(readings(), H200)
    other = learned.for_another_card()
    assert other.factors == learned.factors
    assert other.sum_time_error == pytest.approx(UNSEEN * learned.sum_time_error)
    with packaged_database().read() as session:
        libraries = dataclasses.make_dataclass("Predictor", ["card"])
        b200 = dataclasses.replace(H200, model="B200", bytes_per_s=8e12)
        predictor = compiled_predictor(session, libraries(b200))
        own = compiled_predictor(session, libraries(H200))
    assert predictor.notes == ("Generated kernels are predicted from those of an NVIDIA H200.",)
    assert own.notes == ()
    assert predictor.learned.sum_time_error == pytest.approx(UNSEEN * own.learned.sum_time_error)


def test_the_packaged_kernels_are_learned_with_the_families_of_their_models() -> None:
    with packaged_database().read() as session:
        found = kernel_readings(session, "NVIDIA H200")
    families = {family for one in found for family in one.calls}
    assert {"gpt", "vit", "vgg", "bert", "opt", "qwen", "mixer"} <= families
    assert all(one.bytes_moved > 0 and one.time_us > 0 for one in found)
    assert not kernel_readings_of_no_card()


def kernel_readings_of_no_card() -> list[KernelReading]:
    with packaged_database().read() as session:
        return kernel_readings(session, "No Such Card")
