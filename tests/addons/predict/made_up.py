"""Readings of an imaginary card whose times are a smooth function of sizes, which a predictor can
learn.
"""

from __future__ import annotations

import functools

import numpy as np

from farm.addons.predict.call_features import describe
from farm.addons.predict.dataset import (
    Dataset,
    DatasetConditions,
    MeasuredModel,
    TrainingRow,
    without_values,
)
from farm.addons.predict.gaussian_process import fit_process
from farm.addons.predict.predictors import PredictorSpec, fit_effects
from farm.addons.predict.regressors import fit_medians, fit_trees
from farm.addons.predict.tile_roofline import card_rates
from farm.types.figure import Figure, PassCost
from farm.types.protocol import Protocol
from farm.types.software import Software
from farm.types.variant import Variant

H200 = card_rates("cuda", "NVIDIA H200")
#: A predictor that is fitted at once, and the two parts of `best`.
MEDIANS = PredictorSpec("medians", fit_medians, fit_medians, in_model=fit_medians)
PROCESS = PredictorSpec("process", fit_process, fit_process, in_model=fit_effects)
_FIT_TREES = functools.partial(fit_trees, trees=60)
TREES = PredictorSpec("trees", _FIT_TREES, _FIT_TREES, in_model=fit_effects)
ABOUT = DatasetConditions("NVIDIA H200", Software(torch="2.11.0+cu130", cuda="13.0"), 5, Protocol())


@functools.cache
def dataset(seed: int = 0, rows: int = 40) -> Dataset:
    """`rows` readings of each of `Linear`, `ReLU` and `add`."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(rows):
        batch, width, out = (
            int(2 ** random.integers(low, high)) for low, high in ((0, 10), (5, 12), (5, 12))
        )
        given = {"role": "activation", "shape": [batch, width], "dtype": "float32", "storage": 0}
        weight = {
            "role": "parameter",
            "name": "weight",
            "shape": [out, width],
            "dtype": "float32",
            "storage": 1,
        }
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
                "arguments": [
                    {"tensor": index} for index, one in enumerate(tensors) if "name" not in one
                ],
                "tensors": tensors,
            }
            output, key = (
                [batch, out if name == "Linear" else width],
                f"{name} {batch} {width} {out}",
            )
            call = describe(H200, key, name, spec, flops, moved, "normal", outputs=[output])
            slower = {"Linear": 1.5, "ReLU": 1.1, "add": 1.3}[name] * random.lognormal(0, 0.02)
            time_us = 1.0 + (call.roofline_us + 0.2 * call.roofline_us**0.7) * slower
            power_w = 120 + 500 * (1 - np.exp(-call.roofline_us / 20))
            found.append(
                TrainingRow(
                    f"{seed} {number} {name}",
                    call,
                    PassCost(
                        Figure(time_us, 0.01 * time_us),
                        Figure(power_w * time_us * 1e-3, 0.02 * power_w * time_us * 1e-3),
                    ),
                    0.1,
                    0.05,
                    (),
                    (),
                )
            )
    return Dataset(H200, ABOUT, tuple(found))


def models(
    data: Dataset, families: tuple[str, ...] = ("resnet", "vgg", "llama", "vit", "bert")
) -> list[MeasuredModel]:
    """A model of each family with rows of its own. The whole model costs their sum."""
    found = []
    for number, family in enumerate(families):
        rows = data.rows[
            number * len(data) // len(families) : (number + 1) * len(data) // len(families)
        ]
        calls = without_values(Dataset(data.card, data.conditions, rows))
        time_us = sum(2 * (row.cost.time_us.value + row.neighbours_us) for row in rows)
        energy_mj = sum(2 * row.cost.energy_mj.value for row in rows)
        variant = Variant(f"{family}18", 2, 64)
        found.append(
            MeasuredModel(
                str(variant),
                variant,
                family,
                calls,
                (2,) * len(calls),
                0.0,
                PassCost(Figure(time_us), Figure(energy_mj)),
            )
        )
    return found
