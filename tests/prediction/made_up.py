"""Readings of calls on a card that there is not: times are a smooth function of sizes, so that a predictor can learn it."""

from __future__ import annotations

import functools

import numpy as np

from farm.prediction.card import card_model
from farm.prediction.dataset import Circumstances, Dataset, Row
from farm.prediction.described import describe
from farm.prediction.measured_models import ReadModel, blind
from farm.types.protocol import Protocol, Software, Variant

H200 = card_model("cuda", "NVIDIA H200")
ABOUT = Circumstances("NVIDIA H200", Software(torch="2.11.0+cu130", cuda="13.0"), 5, Protocol())


@functools.cache
def dataset(seed: int = 0, rows: int = 40) -> Dataset:
    """So many rows of each of `Linear`, `ReLU` and `add`."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(rows):
        batch, width, out = (int(2 ** random.integers(low, high)) for low, high in ((0, 10), (5, 12), (5, 12)))
        given = {"role": "activation", "shape": [batch, width], "dtype": "float32", "storage": 0}
        weight = {"role": "parameter", "name": "weight", "shape": [out, width], "dtype": "float32", "storage": 1}
        size = 4 * batch * width
        calls = {
            "Linear": ([weight, given], {"in_features": width, "out_features": out}, 2 * batch * width * out,
                       size + 4 * out * (width + batch)),
            "ReLU": ([given], {}, 0, 2 * size),
            "add": ([given, {**given, "storage": 1}], {}, 0, 3 * size),
        }  # fmt: skip
        for name, (tensors, parameters, flops, moved) in calls.items():
            spec = {
                "kind": "module",
                "parameters": parameters,
                "arguments": [{"tensor": index} for index, one in enumerate(tensors) if "name" not in one],
                "tensors": tensors,
            }
            call = describe(H200, f"{name} {batch} {width} {out}", name, spec, flops, moved, "normal")
            slower = {"Linear": 1.5, "ReLU": 1.1, "add": 1.3}[name] * random.lognormal(0, 0.02)
            time_us = 1.0 + (call.roofline_us + 0.2 * call.roofline_us**0.7) * slower
            power_w = 120 + 500 * (1 - np.exp(-call.roofline_us / 20))
            found.append(
                Row(
                    f"{seed} {number} {name}",
                    call,
                    time_us,
                    0.01 * time_us,
                    power_w,
                    power_w * time_us * 1e-3,
                    0.02 * power_w * time_us * 1e-3,
                    0.1,
                    0.05,
                    (),
                    (),
                )
            )
    return Dataset(H200, ABOUT, tuple(found))


def models(data: Dataset, families: tuple[str, ...] = ("resnet", "vgg", "llama", "vit", "bert")) -> list[ReadModel]:
    """A model of each family, of rows of its own; what it takes as a whole is the sum of these."""
    found = []
    for number, family in enumerate(families):
        rows = data.rows[number * len(data) // len(families) : (number + 1) * len(data) // len(families)]
        calls = blind(Dataset(data.card, data.circumstances, rows))
        time_us = sum(2 * (row.time_us + row.neighbours_us) for row in rows)
        energy_mj = sum(2 * row.energy_mj for row in rows)
        variant = Variant(f"{family}18", 2, 64)
        found.append(ReadModel(str(variant), variant, family, calls, (2,) * len(calls), 0.0, time_us, energy_mj))
    return found
