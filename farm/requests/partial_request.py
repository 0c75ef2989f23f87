"""What a job gets where a person said nothing: batch, launch and windows that suit the card.

A `Wish` holds what *was* said, on the command line or in a measurement file; everything else is None. It becomes
a `Request` only when the kind of card is known, because a sensible batch and launch depend on it.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from farm.errors import CaptureError, UnknownOperator, UsageError
from farm.types.protocol import Protocol, Stopping, Variant
from farm.types.protocol import Protocol as Method
from farm.types.request import Request, Sweep, named
from farm.types.tuple import short_name_of


@dataclass(frozen=True)
class Defaults:
    """What suits one kind of card."""

    batch: int
    launch: str
    stopping: Stopping
    data: str = "normal"


_DEFAULTS = {
    "cuda": Defaults(batch=32, launch="graph", stopping=Stopping(), data="seen"),  # values move an H200's power by 5 %
    # A CPU has no graphs and seldom an energy counter, so short windows do: resnet18 ends in about two minutes.
    "cpu": Defaults(batch=4, launch="eager", stopping=Stopping(warm_up_s=0.2, minimum_s=0.3, maximum_s=1.5)),
    "simulated": Defaults(batch=32, launch="graph", stopping=Stopping(warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1)),
}

#: `--quick`: figures to look at, not to publish.
QUICK: dict[str, Any] = {
    "warm_up_s": 0.1,
    "minimum_s": 0.1,
    "maximum_s": 0.5,
    "time_half_width": 0.03,
    "energy_half_width": 0.06,
}


def defaults_for(card_kind: str) -> Defaults:
    """The defaults of a kind of card: "cuda", "cpu" or "simulated"."""
    return _DEFAULTS[card_kind]


def default_data(card_kind: str, step: str = "") -> str:
    """What stands in tensors. Of a training step's tuples nothing was seen: a forward pass alone does not run them."""
    return "normal" if step else defaults_for(card_kind).data


def default_dtype(model: str, card_kind: str) -> str:
    """What a model is read in on a kind of card: models that generate text are served in bfloat16, which few CPUs have
    arithmetic for.

    Raises:
        UnknownModel, UnsupportedModel: the catalog does not have it, or refuses it.
    """
    from farm.models.catalog import find

    return "bfloat16" if find(model).generates and card_kind != "cpu" else "float32"


@dataclass(frozen=True)
class Wish:
    """What a person said about one job; None is "not said". Exactly one of model and sweep is set when it is complete.

    ``where`` says where it was said ("jobs.yml:12", or "" for the command line), for messages.
    """

    model: str | None = None
    sweep: Sweep | None = None
    batch: int | None = None
    input_size: int | None = None
    length: int | None = None
    padded: bool | None = None
    phase: str | None = None
    cache: int | None = None
    layers: int | None = None
    text: Path | None = None
    tokenizer: Path | None = None
    step: str | None = None
    optimizer: str | None = None
    amp: str | None = None
    accumulate: int | None = None
    recompute: str | None = None
    dtype: str | None = None
    memory_format: str | None = None
    mode: str | None = None
    weights: str | None = None
    operators: tuple[str, ...] | None = None
    target: float | None = None
    reuse: str | None = None
    placements: str | None = None
    launch: str | None = None
    residency: str | None = None
    data: str | None = None
    grad: bool | None = None
    tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    cudnn_deterministic: bool | None = None
    warm_up_s: float | None = None
    minimum_s: float | None = None
    maximum_s: float | None = None
    time_half_width: float | None = None
    energy_half_width: float | None = None
    where: str = ""

    def over(self, other: Wish) -> Self:
        """This wish where it says something, the other where it does not."""
        said = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) not in (None, "")}
        return dataclasses.replace(other, **said)  # type: ignore[return-value]

    @property
    def title(self) -> str:
        return self.model or str(self.sweep)

    def _said(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_VARIANT, _METHOD, _STOPPING = ([f.name for f in dataclasses.fields(part)] for part in (Variant, Method, Stopping))
_METHOD.remove("placement")  # jobs enumerate placements: which there are is a matter of the tuple


def complete(wish: Wish, card_kind: str, *, target: float) -> Request:
    """The request that a wish becomes on a kind of card.

    Raises:
        UnknownModel, UnsupportedModel: the catalog does not have it, or refuses it.
        UsageError: a value is none of its choices or out of range; the message names it.
    """
    defaults = defaults_for(card_kind)
    data = default_data(card_kind, wish.step or "") if wish.sweep is None else "normal"
    method = Method(**{"launch": defaults.launch, "data": data, **wish._said(_METHOD)})
    if card_kind == "cpu" and method.launch == "graph":
        raise UsageError("A CPU has no CUDA graphs to launch.", "Leave --launch out, or give --launch eager.")
    variant = None
    if wish.sweep is None:
        if wish.model is None:
            raise UsageError("No model was named.", "Name one, e.g. `farm run resnet18`; `farm models` lists them.")
        from farm.models import catalog

        usual = {"batch": defaults.batch, "dtype": default_dtype(wish.model, card_kind)}
        said = {**usual, **wish._said([*_VARIANT, "tokenizer"])}
        variant = catalog.variant(said.pop("model"), **said)
    return Request(
        variant=variant,
        sweep=wish.sweep,
        protocol=method,
        stopping=_stopping(defaults.stopping, wish),
        operators=wish.operators or ("all",),
        target=target if wish.target is None else wish.target,
        reuse=wish.reuse or "model",  # type: ignore[arg-type]  # Request checks it
        placements=wish.placements or "none",  # type: ignore[arg-type]
    )


def _stopping(default: Stopping, wish: Wish) -> Stopping:
    values = {**default.to_json(), **wish._said(_STOPPING)}
    for name, value in values.items():
        above = name in ("maximum_s", "time_half_width", "energy_half_width")
        if not 0 <= value < math.inf or (above and value == 0):
            raise UsageError(
                f"{name} is {value}; it must be {'above 0' if above else 'at least 0'} and finite.",
                "Give the window in seconds, e.g. --window 3.",
            )
    if wish.minimum_s is None:
        values["minimum_s"] = min(values["minimum_s"], values["maximum_s"])
    if values["minimum_s"] > values["maximum_s"]:
        raise UsageError(
            f"The shortest window ({values['minimum_s']} s) is longer than the longest ({values['maximum_s']} s).",
            "Make minimum_s smaller or --window larger.",
        )
    return Stopping(**values)


def operator_names(text: str) -> tuple[str, ...]:
    """ "Conv2d, Linear" as names. "all" and "auto" stand alone."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if len(names) > 1 and (mixed := {"all", "auto"}.intersection(names)):
        raise UsageError(
            f"--operators '{text}' mixes '{mixed.pop()}' with names.", "Give all, auto, or names such as Conv2d,Linear."
        )
    return names


# ----- merged from farm.requests.partial_request
# From a request back to the command line that asks for it: what a report says to repeat it.


def command_of(request: Request) -> str:
    """``farm run resnet50 --batch 32 --input-size 224 ... --reuse none``; "" for a sweep, which stands in a measurement file.

    What differs between kinds of cards is named even where it is the default. Readings are taken anew. Where a text of somebody's
    own was read, which nobody keeps, FILE and FOLDER stand for it and its tokenizer.
    """
    if request.variant is None:
        return ""
    variant, protocol, usual = request.variant, request.protocol, Protocol()
    words = ["farm", "run", variant.model, "--batch", str(variant.batch)]
    words += ["--input-size", str(variant.input_size)] if variant.input_size else []
    words += ["--length", str(variant.length)] if variant.length and variant.phase != "decode" else []
    # Of a model that generates text, a CPU's default is another than a card's.
    words += ["--phase", variant.phase, "--dtype", variant.dtype] if variant.phase else []
    for option, value, default in (
        ("--cache", str(variant.cache), "0"),
        ("--layers", str(variant.layers), "0"),
        ("--dtype", "" if variant.phase else variant.dtype, "" if variant.phase else Variant.dtype),
        ("--memory-format", variant.memory_format, Variant.memory_format),
        ("--mode", "" if variant.step else variant.mode, "" if variant.step else Variant.mode),
        ("--step", variant.step, ""),
        ("--optimizer", variant.optimizer, ""),
        ("--amp", variant.amp, ""),
        ("--accumulate", str(variant.accumulate), "1"),
        ("--recompute", variant.recompute, ""),
        ("--operators", ",".join(request.operators), "all"),
        ("--residency", protocol.residency, usual.residency),
        ("--placements", request.placements, "none"),
    ):
        if value != default:
            words += [option, value]
    words += ["--launch", protocol.launch, "--data", protocol.data]
    words += ["--padded"] * variant.padded
    words += ["--text", "FILE", "--tokenizer", "FOLDER"] if variant.text else []
    words += ["--tf32"] * protocol.tf32 + ["--cudnn-benchmark"] * protocol.cudnn_benchmark
    if all(getattr(request.stopping, name) == value for name, value in QUICK.items()):
        words.append("--quick")
    elif request.stopping.maximum_s != Stopping.maximum_s:
        words += ["--window", f"{request.stopping.maximum_s:g}"]
    return shlex.join([*words, "--reuse", "none"])


# ----- merged from farm.requests.partial_request
# The names of operators that people ask for: whether PyTorch has them, and which one was meant.


def check_asked_operators(requests: Sequence[Request]) -> None:
    """Raises:
    UnknownOperator: a name that a request asks for is of no operator that PyTorch has.
    """
    names = {name for request in requests for name in named(request.operators)}
    check_operator_names(names, [request.variant for request in requests if request.variant])


def check_operator_names(names: Iterable[str], variants: Iterable[Variant] = ()) -> None:
    """
    Args:
        names: short names, such as Conv2d.
        variants: what they are asked of; what these run is suggested before all else.

    Raises:
        UnknownOperator: one of the names is of no operator that PyTorch has.
    """
    names = sorted(names)
    if not names:
        return
    from farm.operators.allow_list import ALLOWED_OPERATORS, ATEN_OVERLOADS
    from farm.operators.sweep import RECIPES

    # Module classes last: of Conv2d and conv2d, which are near to the same misspellings, the class is suggested.
    there = {short_name_of(name) for name in (*ALLOWED_OPERATORS, *ATEN_OVERLOADS)}
    known = sorted(there, key=lambda name: (name[0].isupper(), name))
    for name in names:
        if name not in known:
            raise UnknownOperator.named(name, _run_by(variants), RECIPES, known)


def _run_by(variants: Iterable[Variant]) -> set[str]:
    """The operators of the models, without those that cannot be taken apart: their own job says so."""
    from farm.training.extract import extract

    found: set[str] = set()
    for variant in {variant.model: variant for variant in variants}.values():
        try:
            found.update(spec.short_name for spec in extract(variant).capture.tuples.values())
        except CaptureError:
            continue
    return found
