"""Predictors for estimates, and their files: arrays (`.npz`, never pickled) with JSON.

A stored predictor contains a description of its training data: a hash of the readings, the version
of the features, the card model, the software and the protocol. `load` refuses a file with another
version of the features, but accepts other readings. Predictions have separate 90 % intervals,
because predictions can be wrong by factors."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import re
import typing
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from farm.addons.predict import call_features
from farm.addons.predict.calibration import Calibration
from farm.addons.predict.call_features import CallDescription, describe
from farm.addons.predict.dataset import Dataset, DatasetConditions, cached_share
from farm.addons.predict.predictors import FAR, CallCosts, FittedPredictor
from farm.addons.predict.tile_roofline import CardRates
from farm.errors import DamagedPackage, UsageError, writing_to
from farm.settings import settings
from farm.settings.package_files import DATA, check_package_files
from farm.settings.shared_files import make_private, replacing_file
from farm.types.figure import Figure, PassCost
from farm.types.format import ENERGY, TIME, quantity
from farm.types.protocol import Protocol
from farm.types.roofline import Roofline
from farm.types.software import Software
from farm.types.tuple import NeededTuple


@dataclass(frozen=True)
class PredictedValue:
    """A value with its interval (90 % if not stated otherwise); low and high are None without an
    interval.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def around(cls, value: float, half_width: float) -> PredictedValue:
        """``half_width``: half-width of the interval of log(value); NaN: no interval."""
        ends = (
            (value / np.exp(half_width), value * np.exp(half_width))
            if np.isfinite(half_width)
            else ()
        )
        return cls(*map(float, (value, *ends)))

    @property
    def width(self) -> str:
        """The ends of the interval as shares of the value: `-28 to +40 %`; "" without an
        interval.
        """
        if self.low is None or self.high is None or not self.value:
            return ""
        below, above = self.low / self.value - 1, self.high / self.value - 1
        return f"{100 * below:+z.0f} to {100 * above:+z.0f} %"

    def times(self, factor: float) -> PredictedValue:
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return PredictedValue(self.value * factor, low, high)

    def at_least(self, bound: float) -> PredictedValue:
        """Return the value and its interval without the part below a bound."""
        if self.low is None or self.high is None:
            return PredictedValue(max(self.value, bound))
        return PredictedValue(*(max(each, bound) for each in (self.value, self.low, self.high)))

    def above(self, floor: PredictedValue) -> PredictedValue:
        """Return the value and its interval, of which neither the value nor an end is below that of
        a floor.
        """
        raised = PredictedValue(max(self.value, floor.value), self.low, self.high)
        if self.low is None or self.high is None:
            return raised
        low = floor.value if floor.low is None else floor.low
        return replace(raised, low=max(self.low, low), high=max(self.high, raised.value))


@dataclass(frozen=True)
class PredictedCost:
    """The predicted time and energy of one pass or call. `energy_mj` is None if it is unknown."""

    time_us: PredictedValue
    energy_mj: PredictedValue | None = None

    @property
    def without_intervals(self) -> PassCost:
        energy_mj = Figure(self.energy_mj.value) if self.energy_mj else None
        return PassCost(Figure(self.time_us.value), energy_mj)

    def scaled(self, time: float = 1.0, energy: float = 1.0) -> Self:
        """Return the cost with the time and the energy multiplied by these factors."""
        energy_mj = self.energy_mj and self.energy_mj.times(energy)
        return replace(self, time_us=self.time_us.times(time), energy_mj=energy_mj)


@dataclass(frozen=True)
class CallPrediction(PredictedCost):
    """One call as part of a model. `known`: its operator type has a reading. `far`: no reading is
    similar.
    """

    known: bool = True
    far: bool = False

    def __repr__(self) -> str:
        energy = quantity(self.energy_mj.value if self.energy_mj else None, ENERGY)
        cost = f"{quantity(self.time_us.value, TIME)}, {energy}"
        return f"<CallPrediction {cost}{', far from all readings' if self.far else ''}>"


@dataclass(frozen=True)
class Predictions:
    """Calls in the order of the request, and the cost of all of them.

    `narrowing`: indices of the calls; first the call whose reading would narrow the interval of the
    sum most. `transfer`: what predictions from another card model are based on, with `notes` in
    words."""

    calls: tuple[CallPrediction, ...]
    total: PredictedCost
    narrowing: tuple[int, ...] = ()
    transfer: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


class Predictor(typing.Protocol):
    """Predicts calls on one card under one protocol and software."""

    @property
    def name(self) -> str:
        """The name in the output."""

    @property
    def software(self) -> Software | None:
        """Of the readings that it learned from; None if it learned from none."""

    @property
    def method(self) -> int:
        """The version of the method of these readings."""

    def predict(self, calls: Sequence[NeededTuple], model: Sequence[NeededTuple], /) -> Predictions:
        """Predict calls of a model; see `StoredPredictor.predict`."""


@dataclass(frozen=True)
class RooflinePredictor:
    """Predicts the minimum time at the card's peaks: a lower bound without an interval and without
    energy.

    Its `software` is None: it was not trained with readings. The sum of its times is only a lower
    bound for a model."""

    roofline: Roofline
    name: str = "roofline"
    software: Software | None = None
    method: int = 0

    def predict(self, wanted: Sequence[NeededTuple], model: Sequence[NeededTuple]) -> Predictions:
        times = [self.roofline.call_us(entry) for entry in wanted]
        total = sum(time * entry.all_calls for time, entry in zip(times, wanted, strict=True))
        return Predictions(
            calls=tuple(CallPrediction(PredictedValue(time)) for time in times),
            total=PredictedCost(PredictedValue(total)),
        )


@dataclass(frozen=True)
class StoredPredictor:
    """A fitted predictor, the calibration of its intervals, and what it was fitted to."""

    fitted: FittedPredictor
    calibration: Calibration
    card: CardRates
    conditions: DatasetConditions
    key: str  # of the data set (`Dataset.key`)
    rows: int
    learned: npt.NDArray[np.uint64]  # 64-bit hashes of the ids of its training tuples
    path: Path | None = None

    @classmethod
    def of(
        cls, data: Dataset, fitted: FittedPredictor, calibration: Calibration
    ) -> StoredPredictor:
        learned = np.unique(_hashes(call.operator_id for call in data.calls))
        return cls(fitted, calibration, data.card, data.conditions, data.key, len(data), learned)

    @property
    def name(self) -> str:
        return self.fitted.name

    @property
    def software(self) -> Software:
        return self.conditions.software

    @property
    def method(self) -> int:
        return self.conditions.method

    def has_learned(self, operator_ids: Iterable[str]) -> npt.NDArray[np.bool_]:
        return np.isin(_hashes(operator_ids), self.learned)

    def described(self, wanted: Sequence[NeededTuple]) -> list[CallDescription]:
        of = functools.partial(describe, self.card, tf32=self.conditions.protocol.tf32)
        return [
            of(
                entry.operator_id,
                entry.short_name,
                entry.spec,
                entry.flops,
                entry.bytes_moved,
                outputs=entry.outputs,
            )
            for entry in wanted
        ]

    def costs(self, calls: Sequence[CallDescription]) -> CallCosts:
        return self.fitted.predict(calls)

    def predict(self, wanted: Sequence[NeededTuple], model: Sequence[NeededTuple]) -> Predictions:
        """``model``: all tuples of the model, from which the cached share of its weights is
        estimated.
        """
        calls, counts, wide = (
            self.described(wanted),
            [entry.all_calls for entry in wanted],
            self.calibration,
        )
        costs = self.costs(calls)
        share = cached_share(
            self.described(model), [entry.all_calls for entry in model], self.card.l2_bytes
        )
        times, energies = costs.in_model(share)
        time_widths = wide.half_widths("time", costs.time_spread, costs.known)
        energy_widths = wide.half_widths("energy", costs.energy_spread, costs.known)
        total = costs.sum(calls, counts, share)
        time_us = PredictedValue.around(total.time_us, wide.sum_time * total.time_spread)
        energy_mj: PredictedValue | None = None
        by_call_mj: Iterable[PredictedValue | None] = itertools.repeat(None, len(calls))
        if calls and np.isfinite(energies).all():
            energy_mj = PredictedValue.around(
                total.energy_mj, wide.sum_energy * total.energy_spread
            )
            by_call_mj = map(PredictedValue.around, energies, energy_widths)
        by_call_us = map(PredictedValue.around, times, time_widths)
        predictions = map(
            CallPrediction,
            by_call_us,
            by_call_mj,
            costs.known.tolist(),
            (costs.distance > FAR).tolist(),
        )
        narrowing = np.argsort(-np.array(counts) * times * time_widths, kind="stable")
        return Predictions(
            calls=tuple(predictions),
            total=PredictedCost(time_us, energy_mj),
            narrowing=tuple(map(int, narrowing)),
        )


def _hashes(operator_ids: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.array(
        [int(hashlib.sha256(id_.encode()).hexdigest()[:16], 16) for id_ in operator_ids],
        dtype=np.uint64,
    )


FORMAT = 3
PACKAGED = DATA / "predictors"
MOST_BYTES = 64 << 20  # of one file, and of its unpacked arrays
_DAMAGED = (zipfile.BadZipFile, zlib.error)
REFIT = "Fit the predictor again: farm predict fit."


def folders() -> list[Path]:
    """Return the folders of predictors: first the user's folder, then the package's folder."""
    return [settings().state_dir / "predictors", PACKAGED]


def file_name(conditions: DatasetConditions) -> str:
    """Return a file name: the card's model, the version of torch, and differences from the default
    protocol.
    """
    words = [conditions.card_model, "torch", conditions.software.torch.partition("+")[0]]
    protocol, usual = conditions.protocol, Protocol()
    for value, default in (
        (protocol.launch, usual.launch),
        (protocol.residency, usual.residency),
    ):
        if value != default:
            words.append(value)
    if protocol.tf32:
        words.append("tf32")
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-") + ".npz"


def save(stored: StoredPredictor, path: Path) -> None:
    """Write `path` (.npz) and a JSON file with the same name. The JSON is written last and
    completes the predictor. Its checksum covers both files. Raises `UsageError` if a file cannot be
    written."""
    beside = path.with_suffix(".json")
    description = {
        "format": FORMAT,
        "features_version": call_features.VERSION,
        "features": list(call_features.NAMES),
        "key": stored.key,
        "rows": stored.rows,
        "card": asdict(stored.card),
        "circumstances": stored.conditions.to_json(),
        "calibration": stored.calibration.to_json(),
        "fitted": stored.fitted.about(),
    }
    arrays: dict[str, Any] = {
        name: _narrow(value) for name, value in stored.fitted.arrays().items()
    }
    with writing_to(path):
        make_private(path.parent)
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays, learnt=stored.learned)
        description["checksum"] = _checksum(description, packed.getvalue())
        # A reader that finds only one of the two new files sees that they do not belong together.
        with replacing_file(path) as file:
            file.write(packed.getvalue())
            beside.unlink(missing_ok=True)
        with replacing_file(beside) as file:
            file.write(json.dumps(description, indent=1, allow_nan=False).encode() + b"\n")


def _checksum(about: Mapping[str, Any], arrays: bytes) -> str:
    """Return the SHA-256 of a description, without its checksum, and of the contents of the file of
    the arrays.
    """
    described = {name: value for name, value in about.items() if name != "checksum"}
    text = json.dumps(json.loads(json.dumps(described)), sort_keys=True)
    of_arrays = hashlib.sha256(arrays).hexdigest()
    return hashlib.sha256(f"{text}\n{of_arrays}".encode()).hexdigest()


def _narrow(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert integers to the narrowest type, because most are small."""
    if value.dtype.kind == "i" and value.size:
        return value.astype(
            np.result_type(np.min_scalar_type(value.min()), np.min_scalar_type(value.max()))
        )
    return value


def load(path: Path) -> StoredPredictor:
    """Read a predictor from its .npz file. Raises `UsageError` if there is no such file, it is not
    a predictor or damaged, or its features have another version."""
    description = _about(path.with_suffix(".json"))
    version = description.get("features_version")
    if (description.get("format"), version) != (FORMAT, call_features.VERSION):
        what = (
            f"The predictor '{path}' uses version {version} of the features and format "
            f"{description.get('format')}"
        )
        this = f"this program has version {call_features.VERSION} and format {FORMAT}"
        raise UsageError(f"{what}; {this}.", REFIT)
    _check_package(path)
    try:
        # Predictors of earlier versions have no checksum.
        if "checksum" in description and description["checksum"] != _checksum(
            description, path.read_bytes()
        ):
            raise ValueError("the file is damaged: it differs from its checksum")
        with zipfile.ZipFile(path) as packed:
            if sum(entry.file_size for entry in packed.infolist()) > MOST_BYTES:
                raise ValueError(f"its arrays are larger than {MOST_BYTES} bytes")
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        return StoredPredictor(
            FittedPredictor.from_arrays(description["fitted"], arrays),
            Calibration.from_json(description["calibration"]),
            CardRates(**description["card"]),
            DatasetConditions.from_json(description["circumstances"]),
            description["key"],
            description["rows"],
            arrays["learnt"],
            path,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, *_DAMAGED) as error:
        raise UsageError(
            f"'{path}' is not a predictor: {type(error).__name__}: {error}", REFIT
        ) from error


def _check_package(path: Path) -> None:
    """Raise `UsageError` if a file is damaged that belongs to the package."""
    try:
        check_package_files([path])
    except DamagedPackage as error:
        raise UsageError(error.message, error.next_step) from error


def _about(path: Path) -> dict[str, Any]:
    _check_package(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"the file is larger than {MOST_BYTES} bytes")
        description = json.loads(path.read_text())
        if not isinstance(description, dict):
            raise ValueError("the file is not a JSON object")
        return description
    except OSError as error:
        raise UsageError(f"There is no predictor '{path}': {error.strerror}.", REFIT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not a predictor: {error}", REFIT) from error


def card_models(folders: Iterable[Path]) -> set[str]:
    """Return the card models of all predictors that can be read."""
    models = set()
    for path in itertools.chain.from_iterable(folder.glob("*.json") for folder in folders):
        with contextlib.suppress(UsageError):
            models.add(str((_about(path).get("circumstances") or {}).get("card_model")))
    return models


def find(
    folders: Iterable[Path], card_model: str, torch: str = "", protocol: Protocol | None = None
) -> StoredPredictor | None:
    """Find the predictor of a card for resident data; None if there is none.

    Args:
        folders: a predictor in an earlier folder is preferred.
        torch: the preferred version of torch, or its beginning (2.11). It has priority over the
            order of the folders.
        protocol: its launch and TF32 count; by default a graph without TF32.

    Raises:
        UsageError: the predictor or all candidate files cannot be read.
    """
    requested, unreadable = protocol or Protocol(), []
    candidates: list[tuple[bool, int, list[int], Path]] = []
    for number, folder in enumerate(folders):
        for path in sorted(folder.glob("*.json")):
            try:
                conditions = _about(path).get("circumstances") or {}
            except UsageError as error:
                unreadable.append(error)
                continue
            stored = conditions.get("protocol") or {}
            card_and_launch = (
                conditions.get("card_model"),
                *map(stored.get, ("launch", "residency")),
            )
            tf32 = bool(stored.get("tf32"))
            if (*card_and_launch, tf32) == (
                card_model,
                requested.launch,
                "resident",
                requested.tf32,
            ):
                torch_version = str((conditions.get("software") or {}).get("torch"))
                version = [int(digits) for digits in re.findall(r"\d+", torch_version)]
                candidates.append((torch_version.startswith(torch), -number, version, path))
    if not candidates and unreadable:
        raise unreadable[0]
    return load(max(candidates)[-1].with_suffix(".npz")) if candidates else None
