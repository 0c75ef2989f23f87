"""Predictors that are kept: arrays (`.npz`, never pickled) and JSON beside them. Nothing of it is ever executed.

A kept predictor knows what it was fitted to: a hash of the readings, the version of the features, the card model, the software and
the protocol. One of other features is refused, one of other readings is still of use, and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.errors import UsageError
from farm.prediction import features
from farm.prediction.calibration import Calibration
from farm.prediction.card import CardModel
from farm.prediction.dataset import Circumstances, Dataset
from farm.prediction.predictors import Fitted
from farm.types.protocol import Protocol

FORMAT = 2
FOLDER = Path(__file__).parent.parent / "data" / "predictors"  # those that come with the package
MOST_BYTES = 64 << 20  # of one file, and of its arrays unpacked
AGAIN = "Fit it again: farm predict fit."


@dataclass(frozen=True)
class Kept:
    """A fitted predictor with what its intervals are calibrated by and what it was fitted to."""

    fitted: Fitted
    calibration: Calibration
    card: CardModel
    circumstances: Circumstances
    key: str  # of the data set (`Dataset.key`)
    rows: int
    learnt: npt.NDArray[np.uint64]  # the tuples that it has learnt from: 64 bits of a hash of their ids
    path: Path | None = None

    def has_learnt(self, operator_ids: Iterable[str]) -> npt.NDArray[np.bool_]:
        return np.isin(_bits(operator_ids), self.learnt)

    def about(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "features_version": features.VERSION,
            "features": list(features.NAMES),
            "key": self.key,
            "rows": self.rows,
            "card": self.card.to_json(),
            "circumstances": self.circumstances.to_json(),
            "calibration": self.calibration.to_json(),
            "fitted": self.fitted.about(),
        }


def of(data: Dataset, fitted: Fitted, calibration: Calibration) -> Kept:
    learnt = np.unique(_bits(call.operator_id for call in data.calls))
    return Kept(fitted, calibration, data.card, data.circumstances, data.key, len(data), learnt)


def _bits(operator_ids: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.array([int(hashlib.sha256(id_.encode()).hexdigest()[:16], 16) for id_ in operator_ids], dtype=np.uint64)


def file_name(circumstances: Circumstances) -> str:
    """What such a predictor is called: the card's model and torch's version."""
    words = [circumstances.card_model, "torch", circumstances.software.torch.partition("+")[0]]
    protocol, usual = circumstances.protocol, Protocol()
    words += [
        value
        for name in ("launch", "residency", "placement")
        if (value := getattr(protocol, name)) != getattr(usual, name)
    ]
    words += ["tf32"] * protocol.tf32
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-") + ".npz"


def save(kept: Kept, path: Path) -> None:
    """Write `path` (.npz) and the JSON beside it, the latter last: without it there is no predictor.

    Raises:
        UsageError: they cannot be written.
    """
    beside = path.with_suffix(".json")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.npz")
    untold = unfinished.with_suffix(".json.part")  # no `*.json`, which would be taken for a predictor
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {name: _small(value) for name, value in kept.fitted.arrays().items()}
        np.savez_compressed(unfinished, **arrays, learnt=kept.learnt)
        beside.unlink(missing_ok=True)
        unfinished.replace(path)
        untold.write_text(json.dumps(kept.about(), indent=1, allow_nan=False) + "\n")
        untold.replace(beside)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror or error}.", "Name another file.") from error
    finally:
        unfinished.unlink(missing_ok=True)
        untold.unlink(missing_ok=True)


def _small(value: Any) -> Any:
    """Integers as narrow as they can be: most are small."""
    if value.dtype.kind == "i" and value.size:
        return value.astype(np.result_type(np.min_scalar_type(value.min()), np.min_scalar_type(value.max())))
    return value


def load(path: Path) -> Kept:
    """
    Args:
        path: of the .npz file.

    Raises:
        UsageError: there is none, it is no predictor, or its features are of another version.
    """
    about = _about(path.with_suffix(".json"))
    if about.get("format") != FORMAT or about.get("features_version") != features.VERSION:
        raise UsageError(
            f"The predictor '{path}' is of features of version {about.get('features_version')}, and this farm's are of "
            f"version {features.VERSION}.",
            AGAIN,
        )
    try:
        with zipfile.ZipFile(path) as packed:
            if sum(entry.file_size for entry in packed.infolist()) > MOST_BYTES:
                raise ValueError(f"its arrays are larger than {MOST_BYTES} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        return Kept(
            Fitted.from_arrays(about["fitted"], held),
            Calibration.from_json(about["calibration"]),
            CardModel(**about["card"]),
            Circumstances.from_json(about["circumstances"]),
            about["key"],
            about["rows"],
            held["learnt"],
            path,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"'{path}' is no predictor: {type(error).__name__}: {error}", AGAIN) from error


def _about(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        about = json.loads(path.read_text())
        if not isinstance(about, dict):
            raise ValueError("it is no JSON object")
        return about
    except OSError as error:
        raise UsageError(f"There is no predictor '{path}': {error.strerror}.", AGAIN) from error
    except ValueError as error:
        raise UsageError(f"'{path}' is no predictor: {error}", AGAIN) from error


def find(
    folders: Iterable[Path], card_model: str, torch: str = "", launch: str = "", tf32: bool = False
) -> Kept | None:
    """The predictor of a card, of the first folder that has one of this software, its newest; else of any; None where there is none.

    One of resident data alone: it is what models are summed from.

    Args:
        torch: a version, or its beginning.

    Raises:
        UsageError: the one that is meant cannot be read, or one that cannot be read is all there is.
    """
    fitting: list[tuple[bool, int, list[int], Path]] = []
    unreadable: UsageError | None = None
    for number, folder in enumerate(folders):
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            try:
                circumstances = _about(path).get("circumstances") or {}
            except UsageError as error:
                unreadable = unreadable or error
                continue
            protocol = circumstances.get("protocol") or {}
            alike = protocol.get("launch") == (launch or "graph") and bool(protocol.get("tf32")) == tf32
            alike = alike and protocol.get("residency") == "resident" and not protocol.get("placement")
            if circumstances.get("card_model") == card_model and alike:
                its = str((circumstances.get("software") or {}).get("torch"))
                version = [int(digits) for digits in re.findall(r"\d+", its)]
                fitting.append((its.startswith(torch), -number, version, path))
    if not fitting and unreadable is not None:
        raise unreadable
    return load(max(fitting)[-1].with_suffix(".npz")) if fitting else None
