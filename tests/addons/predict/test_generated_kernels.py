"""Generated kernels are predicted from the bytes that they move, with intervals from families that
were left out."""

from __future__ import annotations

import dataclasses
import math

import pytest

from farm.addons.predict.calibration import UNSEEN
from farm.addons.predict.compiled_models import compiled_predictor, why_lower_bound
from farm.addons.predict.compiled_predictor import (
    CompiledPredictor,
    Factor,
    LibraryReading,
    library_factors,
    library_group,
    library_readings,
)
from farm.addons.predict.generated_kernels import (
    KernelReading,
    KernelWork,
    LearnedKernels,
    kernel_readings,
    without_family,
)
from farm.addons.predict.stored_predictor import (
    CallPrediction,
    PredictedCost,
    PredictedValue,
    Predictions,
)
from farm.addons.predict.tile_roofline import CardRates
from farm.exchange.packaged import packaged_database
from farm.store.database import Database
from farm.types.figure import Figure, PassCost
from farm.types.tuple import NeededTuple
from tests.addons.predict.made_up import H200
from tests.statements import rows_in_order

MIB = 1 << 20


def cost_at(time_us: float, power_w: float) -> PassCost:
    return PassCost(Figure(time_us), Figure(time_us * power_w * 1e-3))


def reading(number: int, family: str, factor: float, kind: str = "pointwise") -> KernelReading:
    work = KernelWork(kind, (number + 1) * 8 * MIB)
    cost = cost_at(factor * work.traffic_us(H200), 400.0)
    return KernelReading(work, cost, {family: 2})


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
    work = KernelWork("pointwise", 8 * MIB)
    assert learned.time_us(H200, work) == pytest.approx(1.2 * work.traffic_us(H200))
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


def test_a_kernel_in_place_reads_from_memory_and_long_arithmetic_is_a_group_of_its_own() -> None:
    parameters = {"fused": "gelu_view", "writes": [0], "outputs": []}
    work = KernelWork.of("pointwise", 8 * MIB, {"parameters": parameters})
    assert (work.in_place, work.has_long_arithmetic) == (True, True)
    assert work.groups == ("pointwise with long arithmetic", "pointwise", "")
    copying = KernelWork.of("pointwise", 8 * MIB, {"parameters": {**parameters, "outputs": [0]}})
    assert copying.traffic_us(H200) < work.traffic_us(H200)
    assert KernelWork("pointwise", 8 * MIB).groups == ("pointwise", "")
    learned = LearnedKernels.of(readings(), H200)
    # No reading has long arithmetic, so the kind counts.
    assert learned.time_us(H200, work) == pytest.approx(1.2 * work.traffic_us(H200))


def test_what_a_family_has_is_not_used_for_it() -> None:
    shared = dataclasses.replace(readings()[0], calls={"gpt": 1, "vit": 1})
    kept = without_family([*readings(), shared], "gpt")
    assert not [one for one in kept if "gpt" in one.calls]
    assert len(kept) == 20


@dataclasses.dataclass(frozen=True)
class Libraries:
    """A predictor of library calls: each takes 10 us and 2 mJ."""

    card: CardRates = H200
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
    parameters = {"fused": "add", "writes": [1], "outputs": [1]}
    spec = {"kind": kind, "parameters": parameters}
    return NeededTuple(f"{name}{bytes_moved}", name, name, 0, bytes_moved, {"": calls}, spec)


def test_a_compiled_model_is_the_sum_of_its_kernels_and_library_calls() -> None:
    learned = LearnedKernels.of(readings(), H200)
    predictor = CompiledPredictor(Libraries(), learned, H200, notes=("a note",))
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


def called(name: str, family: str, time_us: float, power_w: float) -> LibraryReading:
    cost = cost_at(time_us, power_w)
    return LibraryReading(needed(name, "aten", MIB, 1), frozenset({family}), cost)


def test_what_library_calls_cost_more_in_compiled_models_is_a_factor_of_their_group() -> None:
    # The predictor says 10 us and 200 W.
    found = library_factors(
        [
            called("mm", "gpt", 20.0, 220.0),
            called("addmm", "vit", 20.0, 220.0),
            called("convolution", "vgg", 40.0, 200.0),
        ],
        Libraries(),
    )
    assert found["product"].time == pytest.approx(2 ** (2 / 3)), "as if a third family were right"
    assert found["product"].power == pytest.approx(1.1 ** (2 / 3))
    assert found["convolution"] == Factor(pytest.approx(2.0), pytest.approx(1.0))
    assert library_factors([], Libraries()) == {}

    learned = LearnedKernels.of(readings(), H200)
    wanted = [needed("mm", "aten", MIB, 2)]
    predicted = CompiledPredictor(Libraries(), learned, H200, found).predict(wanted, wanted)
    assert predicted.calls[0].time_us.value == pytest.approx(10 * 2 ** (2 / 3))
    assert predicted.total.time_us.low == pytest.approx(2 * 8 * 2 ** (2 / 3))
    assert predicted.total.energy_mj.value == pytest.approx(2 * 2 * 2.2 ** (2 / 3))


def test_convolutions_with_channels_last_are_a_group_of_their_own() -> None:
    last = {"shape": [4, 8, 16, 16], "stride": [2048, 1, 128, 8]}
    call = needed("convolution", "aten", MIB, 1)
    assert library_group(call) == "convolution"
    spec = {**call.spec, "tensors": [last]}
    assert library_group(dataclasses.replace(call, spec=spec)) == "convolution channels last"
    with packaged_database().read() as session:
        groups = {
            library_group(reading.call) for reading in library_readings(session, "NVIDIA H200")
        }
    assert groups >= {"product", "attention", "convolution", "convolution channels last"}


def test_another_card_gets_the_same_factors_and_wider_intervals() -> None:
    learned = LearnedKernels.of(readings(), H200)
    other = learned.for_another_card()
    assert other.factors == learned.factors
    assert other.sum_time_error == pytest.approx(UNSEEN * learned.sum_time_error)
    with packaged_database().read() as session:
        b200 = dataclasses.replace(H200, model="B200", bytes_per_s=8e12)
        predictor = compiled_predictor(session, Libraries(b200))
        own = compiled_predictor(session, Libraries(H200))
    (note,) = predictor.notes
    assert "from those of an NVIDIA H200" in note
    assert own.notes == ()
    assert predictor.learned.sum_time_error == pytest.approx(UNSEEN * own.learned.sum_time_error)


def test_the_packaged_kernels_are_learned_with_the_families_of_their_models() -> None:
    with packaged_database().read() as session:
        found = kernel_readings(session, "NVIDIA H200")
    families = {family for one in found for family in one.calls}
    assert {"gpt", "vit", "vgg", "bert", "opt", "qwen", "mixer"} <= families
    assert all(one.work.bytes_moved > 0 and one.cost.time_us.value > 0 for one in found)
    assert not kernel_readings_of_no_card()


def kernel_readings_of_no_card() -> list[KernelReading]:
    with packaged_database().read() as session:
        return kernel_readings(session, "No Such Card")


def test_a_product_whose_kernel_has_no_reading_makes_a_lower_bound():
    product = NeededTuple("id", "_weight_int8pack_mm", "product", 1000, 1000, {"": 1}, {})
    assert "lower bound" in why_lower_bound([product])
    assert why_lower_bound([dataclasses.replace(product, short_name="mm")]) == ""


def test_readings_of_kernels_do_not_depend_on_the_order_of_rows() -> None:
    """Several captures of a family call a kernel: the newest one counts."""
    database, readings = packaged_database(), []
    for order in (0, 1):
        with rows_in_order(database, order), database.read() as session:
            readings.append(kernel_readings(session, "NVIDIA H200"))
    assert readings[0]
    assert readings[0] == readings[1]


def test_both_kinds_of_databases_have_readings_of_kernels(any_database: Database) -> None:
    with any_database.read() as session:
        assert kernel_readings(session, "NVIDIA H200") == []
