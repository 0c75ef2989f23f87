"""Completes a user's request with defaults, and converts a request back to the command line that
repeats it.

A `PartialRequest` contains the fields given on the command line or in a measurement file.
`complete` adds the defaults. The defaults depend on the kind of card, so the card must be known
first."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import CaptureError, UnknownOperator, UsageError, did_you_mean
from farm.models import own
from farm.types.fields import Field, Record, declared, fields_of
from farm.types.protocol import Protocol, Stopping, Variant
from farm.types.request import Request, Sweep
from farm.types.tuple import short_name_of


@dataclass(frozen=True)
class Defaults:
    """The defaults of one kind of card."""

    batch: int
    launch: str
    stopping: Stopping
    data: str = "normal"


#: Kind of card -> its defaults.
DEFAULTS = {
    "cuda": Defaults(
        batch=32, launch="graph", stopping=Stopping(), data="seen"
    ),  # values change power by 5 % (H200)
    # A CPU has no graphs and rarely an energy counter, so short windows are enough: resnet18 takes
    # about two minutes.
    "cpu": Defaults(
        batch=4, launch="eager", stopping=Stopping(warm_up_s=0.2, minimum_s=0.3, maximum_s=1.5)
    ),
    "simulated": Defaults(
        batch=32, launch="graph", stopping=Stopping(warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1)
    ),
}

#: `--quick`: a first look, not for publication.
QUICK: dict[str, Any] = {
    "warm_up_s": 0.1,
    "minimum_s": 0.1,
    "maximum_s": 0.5,
    "time_half_width": 0.03,
    "energy_half_width": 0.06,
}


def default_data(card_kind: str, alone: bool = True) -> str:
    """The default data class. Values are only recorded in a forward pass on one card (`alone`)."""
    return DEFAULTS[card_kind].data if alone else "normal"


def usual_variant(model: str, card_kind: str, **given: Any) -> Variant:
    """A variant with the given fields, and with a model's default dtype and batch on a kind of
    card: bfloat16 if it generates text, except on CPUs, which rarely have bfloat16 arithmetic; that
    of a user's own model. Raises `UnknownModel` or `UnsupportedModel` if the catalog does not have
    the model or refuses it."""
    from farm.models import catalog

    if given.get("batch") is None:
        given["batch"] = catalog.usual_batch(model, DEFAULTS[card_kind].batch)
    if catalog.find(model).generates and card_kind != "cpu":
        given = {"dtype": "bfloat16", **given}
    return catalog.variant(model, **given)


@dataclass(frozen=True)
class TextFiles(Record):
    """The files of a user's own text. `farm.models.catalog.variant` computes the field
    `Variant.text` from them.
    """

    text: Path | None = declared(None)
    tokenizer: Path | None = declared(None)


#: The fields that a user can give, grouped by the record that contains them.
_OF_VARIANT = (one for kind in (Variant, TextFiles) for one in fields_of(kind))
VARIANT = {one.name: one for one in _OF_VARIANT if one.given and one.name != "model"}
PROTOCOL = {one.name: one for one in fields_of(Protocol) if one.always}  # jobs choose the others
STOPPING = {one.name: one for one in fields_of(Stopping) if one.given}
JOB = {one.name: one for one in fields_of(Request) if one.option}
GIVEN: Mapping[str, Field] = {**VARIANT, **PROTOCOL, **STOPPING, **JOB}


@dataclass(frozen=True, init=False)
class PartialRequest:
    """The fields that a user gave for one job. Other fields are None. A complete request has
    ``model`` or ``sweep``.
    """

    given: Mapping[str, Any]  # field name -> value: the fields in `GIVEN`, `model` and `sweep`
    where: (
        str  # file and line of the request ("jobs.yml:12"), for messages; "" for the command line
    )

    def __init__(self, *, where: str = "", **given: Any) -> None:
        if unknown := given.keys() - GIVEN.keys() - {"model", "sweep"}:
            raise TypeError(f"not fields of a request: {', '.join(sorted(unknown))}")
        object.__setattr__(
            self, "given", {name: given[name] for name in given if given[name] not in (None, "")}
        )
        object.__setattr__(self, "where", where)

    def __getattr__(self, name: str) -> Any:
        if name in GIVEN or name in ("model", "sweep"):
            return self.given.get(name)
        raise AttributeError(name)

    def over(self, other: PartialRequest) -> PartialRequest:
        """Merge two requests. If both have a field, the value of `self` is used."""
        return PartialRequest(where=self.where or other.where, **{**other.given, **self.given})

    @property
    def title(self) -> str:
        return self.given.get("model") or str(self.given.get("sweep"))

    def among(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the given fields that have one of these names."""
        return {name: self.given[name] for name in names if name in self.given}


def complete(partial: PartialRequest, card_kind: str, *, target: float) -> Request:
    """Add the defaults of a kind of card, and `target` if the user gave none. Return the complete
    request. Raises `UnknownModel` or `UnsupportedModel` if the catalog does not have the model or
    refuses it, and `UsageError` with the name of a value that is not allowed."""
    sweep: Sweep | None = partial.sweep
    defaults = DEFAULTS[card_kind]
    split = any(
        (partial.given.get(name) or 1) > 1
        for name in ("tensor_parallel", "data_parallel", "distributed")
    )
    data = default_data(card_kind, not (partial.step or split)) if sweep is None else "normal"
    data = "copied" if partial.compile else data
    protocol = Protocol(**{"launch": defaults.launch, "data": data, **partial.among(PROTOCOL)})
    if card_kind == "cpu" and protocol.launch == "graph":
        raise UsageError(
            "A CPU has no CUDA graphs to launch.", "Omit --launch, or give --launch eager."
        )
    if card_kind == "cpu" and (partial.within or partial.budget_s):
        raise UsageError(
            "--within and --budget need a GPU: a CPU times all tuples in turn until the gap is "
            "known.",
            "Omit them, or give --quick.",
        )
    variant = None
    if partial.model is not None:
        from farm.models import catalog
        from farm.training.version import versioned

        variant = versioned(
            usual_variant(catalog.known(partial.model), card_kind, **partial.among(VARIANT))
        )
    return Request(
        variant=variant,
        sweep=sweep,
        protocol=protocol,
        stopping=_stopping(defaults.stopping, partial),
        **{"target": target, **partial.among(JOB)},
    )


def _stopping(default: Stopping, partial: PartialRequest) -> Stopping:
    values = {**default.to_json(), **partial.among(STOPPING)}
    for name, value in values.items():
        above = name in ("maximum_s", "time_half_width", "energy_half_width")
        if not 0 <= value < math.inf or (above and value == 0):
            message = (
                f"{name} is {value}; it must be {'above 0' if above else 'at least 0'} and finite."
            )
            raise UsageError(
                message,
                "Give windows in seconds, e.g. --window 3, and half-widths as fractions, e.g. "
                "0.01.",
            )
    if partial.minimum_s is None:
        values["minimum_s"] = min(values["minimum_s"], values["maximum_s"])
    if values["minimum_s"] > values["maximum_s"]:
        raise UsageError(
            f"The shortest window ({values['minimum_s']} s) is longer than the longest "
            f"({values['maximum_s']} s).",
            "Give a smaller minimum_s or a larger --window.",
        )
    return Stopping(**values)


def operator_names(text: str) -> tuple[str, ...]:
    """Split "Conv2d, Linear" into names, without duplicates. Raises `UsageError` if there is no
    name, or for "all" or "auto" together with names."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if len(names) > 1 and (mixed := {"all", "auto"}.intersection(names)):
        raise UsageError(
            f"--operators '{text}' mixes '{mixed.pop()}' with names.",
            "Give all, auto, or names such as Conv2d,Linear.",
        )
    if not names:
        raise UsageError(
            "--operators has no names.",
            "Give --operators all, auto, or names such as Conv2d,Linear.",
        )
    return names


def check_kernel_names(names: Iterable[str]) -> None:
    """Raise `UnknownOperator` if a compiled model has no operator (a kind of kernels, or aten) with
    one of these names."""
    names = sorted({*names})
    if not names:
        return
    from farm.subjects.allow_list import ATEN_OVERLOADS
    from farm.subjects.kernel import KERNEL_KINDS

    known = {short_name_of(name) for name in ATEN_OVERLOADS}
    for name in names:
        if name not in KERNEL_KINDS and name not in known:
            raise UnknownOperator(
                f"A compiled model has no operator named '{name}'.",
                did_you_mean(name, KERNEL_KINDS)
                or did_you_mean(name, known)
                or f"Give kinds of kernels ({', '.join(sorted(KERNEL_KINDS))}), "
                "or aten operators such as convolution,addmm.",
            )


def check_operator_names(names: Iterable[str], variants: Iterable[Variant] = ()) -> None:
    """Raise `UnknownOperator` if PyTorch has no operator with one of these short names, such as
    Conv2d. The error suggests operators of the models `variants` first."""
    from farm.operators.sweep import RECIPES

    names = sorted(
        {*names} - RECIPES.keys()
    )  # every PyTorch has these operators; the other names need its import
    if not names:
        return
    from farm.subjects.allow_list import ALLOWED_OPERATORS, ATEN_OVERLOADS

    # Functions before module classes, so that a later class replaces its function: Conv2d is
    # suggested, not conv2d.
    there = {short_name_of(name) for name in (*ALLOWED_OPERATORS, *ATEN_OVERLOADS)}
    known = sorted(there, key=lambda name: (name[0].isupper(), name))
    for name in names:
        if name not in known:
            raise UnknownOperator.named(name, _operators_of(variants), RECIPES, known)


def _operators_of(variants: Iterable[Variant]) -> set[str]:
    """Return the operators of the models. Models that cannot be captured are skipped: their job
    reports the error.
    """
    from farm.training.extract import extract

    found: set[str] = set()
    for variant in {variant.model: variant for variant in variants}.values():
        with contextlib.suppress(CaptureError):
            found.update(spec.short_name for spec in extract(variant).capture.tuples.values())
    return found


def command_of(request: Request) -> str:
    """Return the command that repeats a request: ``farm run resnet50 --batch 32 ... --reuse none``;
    "" for a sweep.

    Options whose default depends on the card are always included. FILE and FOLDER are placeholders
    for a user's own text and its tokenizer, because their paths are not stored."""
    variant = request.variant
    if variant is None:
        return ""
    named = {"batch", "input_size", "phase", "launch", "data", "dtype" if variant.phase else ""}
    skipped = {"text", "target", "reuse"}
    if (
        variant.version and variant.input_size == own.IMAGE_PX
    ):  # its own inputs may have no image size
        skipped.add("input_size")
    skipped |= {"length" if variant.phase == "decode" else "", "mode" if variant.step else ""}
    words = ["farm", "run", variant.model]
    for record in (variant, request.protocol, request):
        for one in fields_of(type(record)):  # type: ignore[arg-type]
            value = getattr(record, one.name)
            usual = value in (0, "") or (value == one.default and one.name not in named)
            if one.option and not usual and one.name not in skipped:
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                words += [one.option[-1].partition("/")[0], *([] if value is True else [text])]
    words += ["--text", "FILE", "--tokenizer", "FOLDER"] if variant.text else []
    if all(getattr(request.stopping, name) == value for name, value in QUICK.items()):
        words.append("--quick")
    elif request.stopping.maximum_s != Stopping.maximum_s:
        words += ["--window", f"{request.stopping.maximum_s:g}"]
    return shlex.join([*words, "--reuse", "none"])
