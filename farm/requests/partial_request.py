"""Completes a user's request with defaults.

A `PartialRequest` contains the fields given on the command line or in a measurement file.
`complete` adds the defaults. The defaults depend on the kind of card, so the card must be known
first."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from farm.errors import CaptureError, FarmError, UnknownOperator, UsageError, did_you_mean
from farm.types.fields import Field, Record, declared, fields_of
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request, named
from farm.types.tuple import short_name_of
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.models.resolved import ResolvedModel
    from farm.training.extract import Extraction


@dataclass(frozen=True)
class Defaults:
    """The defaults of one kind of card, and what it can do."""

    batch: int
    launch: str
    stopping: Stopping
    data: str = "normal"
    text_dtype: str = "bfloat16"  # of models that generate text; "": that of the model
    has_graphs: bool = True
    times_in_turn: bool = False  # all tuples, until the gap is known


#: Kind of card -> its defaults.
DEFAULTS = {
    # values change power by 5 % (H200)
    "cuda": Defaults(batch=32, launch="graph", stopping=Stopping(), data="seen"),
    # A CPU has no graphs and rarely an energy counter, so short windows are enough: resnet18 takes
    # about two minutes.
    "cpu": Defaults(
        batch=4,
        launch="eager",
        stopping=Stopping(warm_up_s=0.2, minimum_s=0.3, maximum_s=1.5),
        text_dtype="",  # a CPU rarely has bfloat16 arithmetic
        has_graphs=False,
        times_in_turn=True,
    ),
    "simulated": Defaults(
        batch=32, launch="graph", stopping=Stopping(warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1)
    ),
}


def default_data(card_kind: str, variant: Variant) -> str:
    """The default data class of a variant on a kind of card."""
    if variant.generates_kernels:
        return variant.data_of_calls
    return DEFAULTS[card_kind].data if variant.records_values else "normal"


@dataclass(frozen=True)
class ResolvedVariant:
    """A variant with its model, which was found one time."""

    variant: Variant
    model: ResolvedModel

    @property
    def title(self) -> str:
        """See `ResolvedModel.title_of`."""
        return self.model.title_of(self.variant)

    @property
    def differences(self) -> list[str]:
        """Lines about what differs between a user's model and the measured one."""
        return self.model.differences(self.variant)

    def versioned(self) -> Variant:
        """See `farm.training.version.versioned`."""
        from farm.training.version import versioned

        return versioned(self.variant, self.model)

    def extraction(self) -> Extraction:
        """See `farm.training.extract.extract`."""
        from farm.training.extract import extract

        return extract(self.variant, model=self.model)


def title_of(variant: Variant) -> str:
    """The title of a variant, as `ResolvedModel.title_of`. If this host does not have the model,
    ``str(variant)``, which does not know the sizes of a user's own inputs."""
    from farm.models import catalog

    with contextlib.suppress(FarmError):
        return catalog.resolve(variant.model).title_of(variant)
    return str(variant)


def usual_variant(name: str, card_kind: str, **fields: Any) -> ResolvedVariant:
    """A variant with the given fields, and with a model's default dtype and batch on a kind of
    card: bfloat16 if it generates text, except on CPUs, which rarely have bfloat16 arithmetic; that
    of a user's own model. ``name``: also the location of a user's function. Raises `UnknownModel`
    or `UnsupportedModel` if the catalog does not have the model or refuses it, and `UsageError` if
    it does not accept a field."""
    from farm.models import catalog

    model = catalog.resolve_given(name)
    return ResolvedVariant(usual_variant_of(model, card_kind, **fields), model)


def usual_variant_of(model: ResolvedModel, card_kind: str, **fields: Any) -> Variant:
    """As `usual_variant`, of a model that was found. Raises `UsageError` if it does not accept a
    field."""
    defaults = DEFAULTS[card_kind]
    if fields.get("batch") is None:
        fields["batch"] = model.usual_batch(defaults.batch)
    if model.entry.generates and defaults.text_dtype:
        fields.setdefault("dtype", defaults.text_dtype)
    return model.variant(**fields)


@dataclass(frozen=True)
class TextFiles(Record):
    """The files of a user's own text. `farm.models.catalog.variant` computes the field
    `Variant.text` from them.
    """

    text: Path | None = declared(None)
    tokenizer: Path | None = declared(None)


#: The fields that a user can give, grouped by the record that contains them.
_OF_VARIANT = (*fields_of(Variant), *fields_of(TextFiles))
VARIANT = {field.name: field for field in _OF_VARIANT if field.given and field.name != "model"}
#: Jobs choose the other fields of a protocol.
PROTOCOL = {field.name: field for field in fields_of(Protocol) if field.always}
STOPPING = {field.name: field for field in fields_of(Stopping) if field.given}
JOB = {field.name: field for field in fields_of(Request) if field.option}
GIVEN: Mapping[str, Field] = {**VARIANT, **PROTOCOL, **STOPPING, **JOB}


@dataclass(frozen=True, init=False)
class PartialRequest:
    """The fields that a user gave for one job. Other fields are None. A complete request has
    ``model`` or ``sweep``.

    Attributes:
        given: field name -> value: the fields in `GIVEN`, `model` and `sweep`.
        where: file and line of the request ("jobs.yml:12"), for messages; "" for the command line.
        resolved: the model, if it was found when its name was checked.
    """

    given: Mapping[str, Any]
    where: str
    resolved: ResolvedModel | None = dataclasses.field(compare=False)

    def __init__(
        self, *, where: str = "", resolved: ResolvedModel | None = None, **fields: Any
    ) -> None:
        unknown = fields.keys() - GIVEN.keys() - {"model", "sweep"}
        if unknown:
            raise TypeError(f"not fields of a request: {', '.join(sorted(unknown))}")
        values = {name: value for name, value in fields.items() if value not in (None, "")}
        object.__setattr__(self, "given", values)
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "resolved", resolved)

    def __getattr__(self, name: str) -> Any:
        if name in GIVEN or name in ("model", "sweep"):
            return self.given.get(name)
        raise AttributeError(name)

    def over(self, other: PartialRequest) -> PartialRequest:
        """Merge two requests. If both have a field, the value of `self` is used."""
        return PartialRequest(
            where=self.where or other.where,
            resolved=self.resolved or other.resolved,
            **{**other.given, **self.given},
        )

    @classmethod
    def of_models(cls, texts: Iterable[str], *, locations: bool) -> list[Self]:
        """One request for each model that a name, a pattern or a location means.

        Args:
            locations: accept the locations of own functions, such as my_models.py:net.

        Raises:
            UsageError: a location is not accepted. UnknownModel, UnsupportedModel: see
                `farm.models.catalog.resolve`.
        """
        from farm.models.catalog import matching, resolve
        from farm.models.own import is_location

        texts = list(texts)
        if not locations and (location := next(filter(is_location, texts), None)):
            raise UsageError(
                f"`farm submit` accepts names only, not the location '{location}': the workers' "
                "hosts have other files.",
                "Register the function in the setting `models` of every host, or use `farm run`.",
            )
        names: list[str] = []
        for text in texts:
            names += matching(text)
        models = {name: resolve(name) for name in names}
        return [cls(model=name, resolved=model) for name, model in models.items()]

    @property
    def title(self) -> str:
        return self.given.get("model") or str(self.given.get("sweep"))

    def among(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the given fields that have one of these names."""
        return {name: self.given[name] for name in names if name in self.given}


def complete(
    partial: PartialRequest, card_kind: str, *, target: float, model: ResolvedModel | None = None
) -> Request:
    """Add the defaults of a kind of card, and `target` if the user gave none. Return the complete
    request. ``model``: the model of the request, if the caller has found it.

    Raises `UnknownModel` or `UnsupportedModel` if the catalog does not have the model or refuses
    it, and `UsageError` with the name of a value that is not allowed."""
    defaults = DEFAULTS[card_kind]
    protocol = Protocol(**{"launch": defaults.launch, **partial.among(PROTOCOL)})
    if protocol.launch == "graph" and not defaults.has_graphs:
        raise UsageError(
            "A CPU has no CUDA graphs to launch.", "Omit --launch, or give --launch eager."
        )
    if defaults.times_in_turn and (partial.within or partial.budget_s):
        raise UsageError(
            "--within and --budget need a GPU: a CPU times all tuples in turn until the gap is "
            "known.",
            "Omit them, or give --quick.",
        )
    variant = None
    if partial.model is not None:
        from farm.models import catalog, quantization
        from farm.training.version import versioned

        model = model or catalog.resolve_given(partial.model)
        variant = versioned(usual_variant_of(model, card_kind, **partial.among(VARIANT)), model)
        quantization.check(variant, card_kind)
        if partial.data is None:
            protocol = protocol.with_data(default_data(card_kind, variant))
    return Request(
        variant=variant,
        sweep=partial.sweep,
        protocol=protocol,
        stopping=_stopping(defaults.stopping, partial),
        **{"target": target, **partial.among(JOB)},
    )


def _stopping(default: Stopping, partial: PartialRequest) -> Stopping:
    values = {**default.to_json(), **partial.among(STOPPING)}
    for name, value in values.items():
        is_positive = name in ("maximum_s", "time_half_width", "energy_half_width")
        if not 0 <= value < math.inf or (is_positive and value == 0):
            least = "above 0" if is_positive else "at least 0"
            raise UsageError(
                f"{name} is {value}; it must be {least} and finite.",
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
    choices = {"all", "auto"}.intersection(names)
    if len(names) > 1 and choices:
        raise UsageError(
            f"--operators '{text}' mixes '{choices.pop()}' with names.",
            "Give all, auto, or names such as Conv2d,Linear.",
        )
    if not names:
        raise UsageError(
            "--operators has no names.",
            "Give --operators all, auto, or names such as Conv2d,Linear.",
        )
    return names


def check_names(requests: Iterable[Request]) -> None:
    """Raise `UnknownOperator` if a request names an operator that neither PyTorch nor a generated
    kernel has."""
    kernel_names, operator_names, variants = set[str](), set[str](), []
    for request in requests:
        if request.variant is not None and request.variant.generates_kernels:
            kernel_names.update(named(request.operators))
            continue
        operator_names.update(named(request.operators))
        if request.variant is not None:
            variants.append(request.variant)
    check_kernel_names(kernel_names)
    check_operator_names(operator_names, variants)


def check_kernel_names(names: Iterable[str]) -> None:
    """Raise `UnknownOperator` if no kind of generated kernels and no overload of aten has one of
    these names."""
    names = sorted({*names})
    if not names:
        return
    from farm.subjects.allow_list import ATEN_OVERLOADS
    from farm.subjects.kernel import KERNEL_KINDS

    overloads = {short_name_of(name) for name in ATEN_OVERLOADS}
    for name in names:
        if name not in KERNEL_KINDS and name not in overloads:
            raise UnknownOperator(
                f"A compiled model has no operator named '{name}'.",
                did_you_mean(name, KERNEL_KINDS)
                or did_you_mean(name, overloads)
                or f"Give kinds of kernels ({', '.join(sorted(KERNEL_KINDS))}), "
                "or aten operators such as convolution,addmm.",
            )


def check_operator_names(names: Iterable[str], variants: Iterable[Variant] = ()) -> None:
    """Raise `UnknownOperator` if PyTorch has no operator with one of these short names, such as
    Conv2d. The error suggests operators of the models `variants` first."""
    from farm.subjects.sweep import RECIPES

    # Every PyTorch has the operators of `RECIPES`; the other names need its import.
    names = sorted({*names} - RECIPES.keys())
    if not names:
        return
    from farm.subjects.allow_list import ALLOWED_OPERATORS, ATEN_OVERLOADS

    # Functions before module classes, so that a later class replaces its function: Conv2d is
    # suggested, not conv2d.
    operators = {short_name_of(name) for name in (*ALLOWED_OPERATORS, *ATEN_OVERLOADS)}
    in_order = sorted(operators, key=lambda name: (name[0].isupper(), name))
    for name in names:
        if name not in operators:
            raise UnknownOperator.named(name, _operators_of(variants), RECIPES, in_order)


def _operators_of(variants: Iterable[Variant]) -> set[str]:
    """Return the operators of the models. Models that cannot be captured are skipped: their job
    reports the error.
    """
    from farm.training.extract import extract

    names: set[str] = set()
    for variant in {variant.model: variant for variant in variants}.values():
        with contextlib.suppress(CaptureError):
            names.update(spec.short_name for spec in extract(variant).capture.tuples.values())
    return names
