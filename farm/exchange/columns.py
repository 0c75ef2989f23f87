"""The columns of every exported table, declared once: name, type, meaning, unit, and the type that an import accepts.

The Parquet schemas, the checks of an import, the data dictionary and the names of filters are derived from these
declarations. Columns of variants, software, protocols and figures are the declared fields of their records
(`_declared`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter

from farm.exchange import column_types as accept
from farm.types.fields import fields_of, names_of
from farm.types.protocol import Protocol, Software, Variant
from farm.types.reading import Reading

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1  # increased if a column changes its meaning or is removed, not if a column is added

Kind = Literal["text", "integer", "number", "boolean", "integers", "numbers", "texts", "json"]


@dataclass(frozen=True)
class Column:
    """One column of an exported table.

    Attributes:
        kind: the type of the values. `json` is JSON as text; `integers`, `numbers` and `texts` are lists.
        accepts: the type that an import accepts; None: the type of the kind (`column_types.OF_KIND`).
        derived: an export computes it from other columns, and an import ignores it.
    """

    name: str
    kind: Kind
    meaning: str
    unit: str = ""
    accepts: Any = None
    derived: bool = False

    @functools.cached_property
    def check(self) -> Callable[[Any], Any]:
        """Return a function that converts a value of a file to its stored form. It raises ValueError or FarmError."""
        accepted = accept.OF_KIND[self.kind] if self.accepts is None else self.accepts
        return TypeAdapter(accepted, config=ConfigDict(strict=True)).validate_python


def _columns(*rows: tuple[Any, ...] | str, derived: bool = False) -> tuple[Column, ...]:
    """Create columns from tuples of their fields. A text names existing columns of readings, separated by blanks."""
    named = {column.name: column for column in READINGS} if any(isinstance(row, str) for row in rows) else {}
    found = []
    for row in rows:
        found += [named[name] for name in row.split()] if isinstance(row, str) else [Column(*row)]
    return _derived(found) if derived else tuple(found)


def _derived(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(replace(column, derived=True) for column in columns)


def _accepting(columns: Sequence[Column], **accepts: Any) -> tuple[Column, ...]:
    """Return the columns; `accepts` replaces the accepted type of the columns that it names."""
    return tuple(replace(column, accepts=accepts.get(column.name, column.accepts)) for column in columns)


#: Annotation of a field -> kind of its column, and the accepted type if the field is required.
_OF_ANNOTATION: Mapping[Any, tuple[Kind, Any]] = {
    int: ("integer", accept.Count),
    float: ("number", accept.Positive),
    bool: ("boolean", bool),
    str: ("text", accept.Text),
}


def _declared(record: type, *, without: str = "") -> tuple[Column, ...]:
    """The columns of a record: one for each declared text, number or boolean."""
    found = []
    for one in fields_of(record):
        if one.type in _OF_ANNOTATION and one.name != without:
            kind, accepted = _OF_ANNOTATION[one.type]
            accepted = accepted | None if one.default is None else accepted
            found.append(Column(one.name, kind, one.meaning, one.unit, accepted))
    return tuple(found)


#: Parameters of modules that have their own columns. The column `parameters` contains the others.
PARAMETERS = _columns(
    ("in_channels", "integer", "input channels"),
    ("out_channels", "integer", "output channels"),
    ("kernel_size", "integers", "of a convolution or pool, for each dimension"),
    ("stride", "integers", "of a convolution or pool, for each dimension"),
    ("padding", "integers", "of a convolution or pool, for each dimension; empty if it was given as a word"),
    ("dilation", "integers", "of a convolution or pool, for each dimension"),
    ("groups", "integer", "groups of channels of a convolution"),
    ("bias", "boolean", "it adds a bias"),
    ("in_features", "integer", "input features"),
    ("out_features", "integer", "output features"),
    ("num_features", "integer", "features that are normalised"),
    ("normalized_shape", "integers", "sizes of the last dimensions, over which it normalises"),
    ("num_groups", "integer", "groups of channels that are normalised"),
    ("embed_dim", "integer", "of an attention"),
    ("num_heads", "integer", "of an attention"),
    ("hidden_size", "integer", "of a recurrent layer"),
    ("num_layers", "integer", "of a recurrent layer"),
    ("num_embeddings", "integer", "rows of an embedding's table"),
    ("embedding_dim", "integer", "columns of an embedding's table"),
    ("output_size", "integers", "of an adaptive pool, for each dimension"),
    ("inplace", "boolean", "it writes into its input"),
    derived=True,
)

OPERATOR = (
    *_columns(
        ("operator", "text", "the operator's short name, such as Conv2d"),
        ("operator_name", "text", "its full name, such as torch.nn.Conv2d"),
        ("label", "text", "one line for people; do not parse it"),
        ("training", "boolean", "the module was in training mode"),
        ("input_shape", "integers", "of the first tensor of the call"),
        ("input_shapes", "json", "of all tensors of the call, in order"),
        derived=True,
    ),
    Column("output_shape", "integers", "of the first output; empty if unknown", "", accept.Shape),
    Column("output_shapes", "json", "of all outputs, in order; null if unknown", "", accept.Shapes),
    *_columns(
        ("m", "integer", "of a product of m x k by k x n"),
        ("n", "integer", "of a product of m x k by k x n"),
        ("k", "integer", "of a product of m x k by k x n"),
        ("products", "integer", "number of such products in one call"),
        derived=True,
    ),
    *PARAMETERS,
    Column("parameters", "json", "all arguments of the constructor and the call except tensors", derived=True),
    Column(
        "flops", "integer", "of one call: 2 per multiply-add of products, convolutions, attention", "FLOP", accept.Count
    ),
    Column("bytes_moved", "integer", "what one call must read and write at least once", "B", accept.Count),
    Column("flops_per_byte", "number", "arithmetic intensity: flops / bytes_moved", "FLOP/B", derived=True),
    Column("operator_spec", "json", "the complete operator tuple; its id is the hash of it", "", accept.Tuple | None),
)

VARIANT = (
    *_declared(Variant, without="dtype"),  # every table declares its own column `dtype`
    Column("model_flops", "integer", "of one pass, by PyTorch's own counter", "FLOP", accept.Count),
)
VARIANT = _accepting(VARIANT, text=accept.text(32), recompute=accept.text(10_000))
_SECOND = next(column for column in VARIANT if column.name == "weights")  # the column's position in all exports so far
VARIANT = (VARIANT[0], _SECOND, *(column for column in VARIANT[1:] if column is not _SECOND))
VARIANT_FIELDS = names_of(Variant)
#: Columns of the variant in the table of readings. They are null in readings of operators.
_VARIANT_OF_READING = tuple(one if one.kind == "text" else replace(one, accepts=None) for one in VARIANT)

CARD = _columns(
    ("card_id", "text", "the card: a GPU's UUID, or a name for a host's CPU", "", accept.text(80, 1)),
    ("card_model", "text", "its model, such as NVIDIA H200", "", accept.Name),
    ("card_kind", "text", "cuda, cpu or simulated", "", Literal["cuda", "cpu", "simulated"]),
    ("card_memory_bytes", "integer", "its memory", "B", accept.Count),
    ("card_fingerprint", "json", "measured at its first use: peaks, idle levels, sensors", "", accept.Object),
)

SOFTWARE = _accepting(_declared(Software), torch=accept.Name)

#: The column of `Protocol.data` is named data_class.
PROTOCOL = tuple(replace(one, name="data_class") if one.name == "data" else one for one in _declared(Protocol))


#: Columns with the same name in the database table of readings.
FIGURES = (
    *_declared(Reading),
    Column("simulated", "boolean", "the card was simulated: the figures describe no real card", "", bool),
    Column("created_at_s", "number", "time of writing on its database's clock", "s since 1970", accept.Positive),
)
FIGURES = _accepting(FIGURES, temperature_c=accept.Number | None)

#: Columns from a reading's details: column -> (part of the details or "", key).
IN_DETAILS: Mapping[str, tuple[str, str]] = {
    **{
        f"burst_{name}": ("burst", name)
        for name in ("time_us", "time_half_width_us", "power_w", "energy_mj", "energy_half_width_mj", "sm_clock_mhz")
    },
    "alone_time_us": ("context", "alone_us"),
    "neighbours_effect_us": ("context", "effect_us"),
    "neighbours_effect_half_width_us": ("context", "effect_half_width_us"),
    "eager_time_us": ("", "eager_time_us"),
}

READINGS = (
    *_columns(
        ("reading_id", "text", "the reading", "", accept.Id),
        ("subject_kind", "text", "operator (an operator tuple) or variant (a whole model)"),
        ("subject_id", "text", "the tuple or the model variant: a hash of its description"),
        ("dtype", "text", "of the arithmetic: the dtype of the first floating-point tensor, or of the model"),
    ),
    *OPERATOR,
    *_VARIANT_OF_READING,
    *FIGURES,
    *_columns(
        ("burst_time_us", "number", "one pass in bursts at full clocks, if the loop reaches the power limit", "µs"),
        ("burst_time_half_width_us", "number", "half of its 95 % interval", "µs"),
        ("burst_power_w", "number", "power in bursts", "W"),
        ("burst_energy_mj", "number", "one pass in bursts", "mJ"),
        ("burst_energy_half_width_mj", "number", "half of its 95 % interval", "mJ"),
        ("burst_sm_clock_mhz", "number", "clock in bursts", "MHz"),
        ("alone_time_us", "number", "one pass in a loop, with weights and inputs as warm as possible", "µs"),
        ("neighbours_effect_us", "number", "time that other operators before it add to one pass", "µs"),
        ("neighbours_effect_half_width_us", "number", "half of its 95 % interval", "µs"),
        ("eager_time_us", "number", "of a whole model: one pass with eager launch", "µs"),
        ("roofline_share", "number", "least time at the card's peaks by FLOPs and bytes, over the measured time", "1"),
        derived=True,
    ),
    *_columns(
        ("kernels", "json", "kernel -> launches in one call, if it was observed on a card", "", accept.Numbers | None),
        ("flags", "texts", "what a reader should know; docs/method.md explains each flag"),
        ("throttle_reasons", "texts", "why the card reduced its clocks"),
    ),
    *_columns(
        ("method", "integer", "version of the measuring method; readings of two methods are not compared"),
        ("card_time_s", "number", "total time that the card was held for the reading", "s"),
        derived=True,
    ),
    *CARD,
    *SOFTWARE,
    *PROTOCOL,
    *_columns(
        ("details", "json", "everything else that was found", "", accept.Details),
        ("cost_s", "json", "phase -> time on the card", "s", accept.Numbers),
        ("origin", "text", "the farm that it was imported from; empty: measured by the exporting farm"),
    ),
)

_CAPTURE_ID = Column(
    "capture_id", "text", "hash of variant, device type, grad mode, torch, launch, kind", "", accept.Id
)
_CAPTURED = (
    *_columns(
        ("device_type", "text", "cuda or cpu", "", Literal["cuda", "cpu"]),
        ("grad", "boolean", "autograd recorded", "", bool),
        ("torch", "text", "version that captured it"),
        ("launch", "text", "graph or eager (a graph may run other operators)", "", Literal["graph", "eager"]),
        ("captured", "text", "predicted, or observed on a card", "", Literal["predicted", "observed"]),
    ),
    Column("variant_id", "text", "the model variant", derived=True),
    Column("dtype", "text", "of the model"),
    *VARIANT,
)
_ORIGIN = Column("origin", "text", "the farm that it was imported from; empty: of the exporting farm")

CALLS = (
    _CAPTURE_ID,
    *_derived(_CAPTURED),
    *_columns(
        ("call_index", "integer", "position in the pass, from 0", "", accept.Count),
        ("module_path", "text", "position in the model, such as layer1.0.conv1", "", accept.Path),
        ("operator_id", "text", "the operator tuple; `subject_id` of its readings"),
        ("part", "text", "of a training step: forward, backward, recomputation, accumulation, loss or optimizer"),
        ("owner", "text", "of a training step: its leaf module or function, such as Conv2d", "", accept.Path),
        ("seen", "json", "statistics of each activation when the model ran; empty: unknown", "", accept.Seen | None),
        ("reads", "json", "storages that it reads", "", accept.Storages),
        ("writes", "json", "storages that it writes", "", accept.Storages),
    ),
    *_accepting(OPERATOR, operator_spec=accept.Tuple),
    replace(_ORIGIN, derived=True),
)

CAPTURES = (
    _CAPTURE_ID,
    *_CAPTURED,
    *_columns(
        ("flops", "integer", "of one pass, by its tuples", "FLOP", accept.Count),
        ("bytes_moved", "integer", "of one pass, by its tuples", "B", accept.Count),
        ("card_id", "text", "the card that it was observed on", "", accept.text(80)),
        ("verification", "json", "what a card ran: kernels, operators, the time of each call", "", accept.Verified),
        ("created_at_s", "number", "time of the capture", "s since 1970", accept.Number),
    ),
    _ORIGIN,
)

_NOTE, _SOME_NAMES = accept.text(1000, 1) | None, list[accept.Name] | None
VERDICTS = _columns(
    ("job_id", "text", "the job", "", accept.text(16, 1)),
    ("round", "integer", "of the job", "", accept.Count),
    ("title", "text", "of the job", "", _NOTE),
    ("job_kind", "text", "model or sweep", "", _NOTE),
    ("variant_id", "text", "the model variant; empty for a sweep", "", accept.Id | None),
    ("card_models", "texts", "the models of its cards"),
    ("launch", "text", "graph or eager", "", _NOTE),
    ("residency", "text", "as in readings", "", _NOTE),
    ("data_policy", "text", "seen: each call under its own data class; otherwise that class", "", _NOTE),
    ("outcome", "text", "pass, fail or none", "", _NOTE),
    ("target", "number", "least accuracy and coverage of a pass", "1"),
    ("coverage", "number", "share of the estimated cost that was measured", "1"),
    ("accuracy_time", "number", "1 - |sum - whole| / whole", "1"),
    ("accuracy_energy", "number", "1 - |sum - whole| / whole", "1"),
    ("sum_time_us", "number", "sum of the parts", "µs"),
    ("sum_time_half_width_us", "number", "half of its 95 % interval", "µs"),
    ("whole_time_us", "number", "the whole model", "µs"),
    ("whole_time_half_width_us", "number", "half of its 95 % interval", "µs"),
    ("sum_energy_mj", "number", "sum of the parts", "mJ"),
    ("sum_energy_half_width_mj", "number", "half of its 95 % interval", "mJ"),
    ("whole_energy_mj", "number", "the whole model", "mJ"),
    ("whole_energy_half_width_mj", "number", "half of its 95 % interval", "mJ"),
    ("parts", "integer", "operator tuples of the model"),
    ("measured", "integer", "operator tuples with a reading"),
    ("created_at_s", "number", "time of the verdict", "s since 1970"),
    ("details", "json", "the complete verdict", "", accept.VerdictDetails),
    ("request", "json", "the request of the job", "", accept.RequestText | None),
    ("capture_id", "text", "the capture that calls are counted by; empty for a sweep", "", accept.Id | None),
    ("operators", "texts", "operator types in scope; `all`: all of them", "", _SOME_NAMES),
    ("made_of", "json", "its readings: id, role (tuple, whole, canary), round, reused", "", accept.MadeOf | None),
    ("origin", "text", "the farm that it was imported from; empty: of the exporting farm"),
)

TRACES = _columns(
    ("reading_id", "text", "the reading", "", accept.Id),
    ("series", "text", "what was sampled, with its unit in the name", "", accept.Name),
    ("window_begin_s", "number", "begin of the window on the axis of the samples", "s", accept.Number),
    ("window_end_s", "number", "end of the window on the axis of the samples", "s", accept.Number),
    ("times_s", "numbers", "of the samples, since the warm-up began", "s"),
    ("values", "numbers", "of the samples, in the unit at the end of the series' name"),
)

#: The columns that `farm predict dataset` writes: training data of predictors (`farm.prediction.dataset`).
DATASET = _columns(
    ("operator_id", "text", "the operator tuple"),
    "operator",
    ("operator_type", "text", "the common name of modules, functions and aten operators that do the same work"),
    ("operator_family", "text", "kind of its kernels, such as convolution or pointwise"),
    "dtype data_class training flops bytes_moved flops_per_byte",
    ("m", "integer", "of a product of m x k by k x n, also of a convolution"),
    ("n", "integer", "of such a product"),
    ("k", "integer", "of such a product"),
    ("products", "integer", "number of such products in one call: groups of a convolution, heads of an attention"),
    ("tiles", "integer", "number of tiles of the products; 0 without a product"),
    ("waves", "number", "tiles over the card's multiprocessors"),
    ("wave_share_64x64", "number", "tiles of 64 x 64 over the tiles of complete waves; 1 without a product", "1"),
    ("wave_share_128x64", "number", "the same for tiles of 128 x 64", "1"),
    ("wave_share_256x128", "number", "the same for tiles of 256 x 128", "1"),
    ("roofline_us", "number", "least time at the card's peaks, with a launch", "µs"),
    ("tile_roofline_us", "number", "the same with complete waves of tiles, and with the cache", "µs"),
    ("compute_us", "number", "of the tile roofline, the arithmetic", "µs"),
    ("traffic_us", "number", "of the tile roofline, the bytes", "µs"),
    ("tensors", "integer", "number of its input tensors, with parameters"),
    ("itemsize_bytes", "integer", "of one element", "B"),
    ("elements", "integer", "of the largest input or output tensor"),
    ("elements_given", "integer", "of all tensors of the call"),
    ("parameter_bytes", "integer", "of parameters and buffers", "B"),
    ("strided_share", "number", "share of the input elements in tensors that are not contiguous", "1"),
    ("expanded_share", "number", "1 - the smallest input tensor over the largest", "1"),
    ("written_share", "number", "share of the bytes moved beyond the inputs", "1"),
    ("casts", "boolean", "an output or input has another dtype than the first input"),
    ("run_bytes", "integer", "that follow one another in memory, the least over the input tensors", "B"),
    ("casts_to_whole", "boolean", "the name of the output's dtype is an integer or boolean type"),
    ("masked", "number", "of an attention: 0.5 with a boolean mask, 1 with a mask of numbers, 0 without"),
    ("causal", "boolean", "of an attention: each position sees only earlier positions"),
    ("drops", "boolean", "of an attention: it has dropout"),
    ("materialised", "boolean", "an attention that writes its scores, because of its mask, sizes or shared keys"),
    ("along_last", "number", "1: works along the last dimension; 0: along others; 0.5: has no such parameter"),
    ("along", "integer", "elements along the dimensions in its parameters"),
    ("last_size", "integer", "of the first tensor; of an embedding its width"),
    ("rows", "integer", "elements of the first tensor over its last size; of an embedding the requested rows"),
    ("batch", "integer", "the first size of the first tensor"),
    ("window", "integer", "elements of the kernel of a convolution or pool"),
    ("stride", "integer", "elements of its step"),
    ("dilation", "integer", "elements of its dilation"),
    ("channels_in", "integer", "of an image"),
    ("channels_out", "integer", "of an image, if known"),
    ("pixels", "integer", "of an input image"),
    ("zeros", "number", "share of zeros by the data class, the mean over activations", "1"),
    ("positive", "number", "share of the activation tensors that have no negative value", "1"),
    ("channels", "number", "share of the variance that is between channels, the mean over activations", "1"),
    ("data_known", "boolean", "the data class is known"),
    "reading_id time_us time_half_width_us",
    ("power_w", "number", "mean power, energy divided by time; empty if the card has no power sensor", "W"),
    "energy_mj energy_half_width_mj",
    ("neighbours_us", "number", "time that other operators before it add to one pass", "µs"),
    ("fetching_us", "number", "part of it: fetching weights, which a small model finds in the cache", "µs"),
    "flags",
    ("kernels", "texts", "kernels of one call, if they were imported with it; predictors do not use them"),
    "card_model torch cuda cudnn driver method launch residency tf32",
    ("features_version", "integer", "version of the columns that predictors use"),
)

TABLES: Mapping[str, tuple[Column, ...]] = {
    "readings": READINGS,
    "calls": CALLS,
    "captures": CAPTURES,
    "verdicts": VERDICTS,
    "traces": TRACES,
}

#: Columns that were added to this format later -> the value that an import uses if a file lacks the column.
_OF_A_VARIANT = {one.name: one.default for one in fields_of(Variant) if not one.always}
ADDED: Mapping[str, Mapping[str, Any]] = {
    "verdicts": dict.fromkeys(["request", "capture_id", "operators", "made_of"]),
    "readings": _OF_A_VARIANT | {"placement": "", "output_shapes": None},
    "captures": _OF_A_VARIANT,
    "calls": _OF_A_VARIANT | {"part": "", "owner": "", "output_shapes": None},
}

_ONE_ROW_IS = {
    "readings": "one reading: a subject, a card, software and a protocol, with the result",
    "calls": "one operator call of a captured model, in order",
    "captures": "one capture of a model variant",
    "verdicts": "the sum of the parts compared with the whole model, for one round of a job",
    "traces": "one sampled series of one reading (only with `--traces`)",
    "dataset": "one operator tuple as predictors learn from it (`farm predict dataset`; not part of an export)",
}


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The Arrow schema of these columns. The metadata of each field has its unit and meaning."""
    import pyarrow as pa

    kinds = {
        "text": pa.string(),
        "json": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
        "boolean": pa.bool_(),
        "integers": pa.list_(pa.int64()),
        "numbers": pa.list_(pa.float64()),
        "texts": pa.list_(pa.string()),
    }
    return pa.schema(
        pa.field(one.name, kinds[one.kind], metadata={"unit": one.unit, "meaning": one.meaning}) for one in columns
    )


def as_markdown() -> str:
    """The data dictionary as Markdown text."""
    text = f"""# Data dictionary

The tables of `farm export`, format {FORMAT}. Half-widths are of the 95 % interval; a unit of 1 is a fraction. A value
that could not be measured is empty, never zero. Lists are lists in Parquet and JSON Lines; in CSV they are joined by
`x` (numbers) or `;` (texts). JSON is a text in Parquet and CSV. In Parquet, each field's metadata holds its unit and
meaning.
"""
    for table, columns in {**TABLES, "dataset": DATASET}.items():
        text += f"\n## {table}\n\nOne row is {_ONE_ROW_IS[table]}.\n\n"
        text += "| column | type | unit | meaning |\n| --- | --- | --- | --- |\n"
        text += "".join(f"| `{one.name}` | {one.kind} | {one.unit} | {one.meaning} |\n" for one in columns)
    return text


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
