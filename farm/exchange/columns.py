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
from farm.types.reading import Burst, Reading

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
    ("kernel_size", "integers", "kernel size of a convolution or pool, per dimension"),
    ("stride", "integers", "stride of a convolution or pool, per dimension"),
    ("padding", "integers", "padding of a convolution or pool, per dimension; empty if it is a word such as 'same'"),
    ("dilation", "integers", "dilation of a convolution or pool, per dimension"),
    ("groups", "integer", "groups of channels in a convolution"),
    ("bias", "boolean", "the operator adds a bias"),
    ("in_features", "integer", "input features"),
    ("out_features", "integer", "output features"),
    ("num_features", "integer", "features that the operator normalises"),
    ("normalized_shape", "integers", "sizes of the last dimensions, over which the operator normalises"),
    ("num_groups", "integer", "groups of channels that the operator normalises"),
    ("embed_dim", "integer", "embedding size of an attention"),
    ("num_heads", "integer", "heads of an attention"),
    ("hidden_size", "integer", "size of the hidden state of a recurrent layer"),
    ("num_layers", "integer", "layers of a recurrent operator"),
    ("num_embeddings", "integer", "rows of an embedding's table"),
    ("embedding_dim", "integer", "columns of an embedding's table"),
    ("output_size", "integers", "output size of an adaptive pool, per dimension"),
    ("inplace", "boolean", "the operator writes its result into its input"),
    derived=True,
)

OPERATOR = (
    *_columns(
        ("operator", "text", "the operator's short name, such as Conv2d"),
        ("operator_name", "text", "the operator's full name, such as torch.nn.Conv2d"),
        ("label", "text", "description of the tuple in one line, for people; do not parse it"),
        ("training", "boolean", "the module was in training mode"),
        ("input_shape", "integers", "shape of the call's first tensor"),
        ("input_shapes", "json", "shapes of all tensors of the call, in order"),
        derived=True,
    ),
    Column("output_shape", "integers", "shape of the first output; empty if unknown", "", accept.Shape),
    Column("output_shapes", "json", "shapes of all outputs, in order; null if unknown", "", accept.Shapes),
    *_columns(
        ("m", "integer", "size m of a matrix product (m x k times k x n)"),
        ("n", "integer", "size n of a matrix product (m x k times k x n)"),
        ("k", "integer", "size k of a matrix product (m x k times k x n)"),
        ("products", "integer", "number of these matrix products in one call"),
        derived=True,
    ),
    *PARAMETERS,
    Column("parameters", "json", "all arguments of the constructor and the call except tensors", derived=True),
    Column(
        "flops",
        "integer",
        "operations of one call: 2 per multiply-add of products, convolutions, attention",
        "FLOP",
        accept.Count,
    ),
    Column("bytes_moved", "integer", "bytes that one call must read or write at least once", "B", accept.Count),
    Column("flops_per_byte", "number", "arithmetic intensity: flops / bytes_moved", "FLOP/B", derived=True),
    Column(
        "operator_spec",
        "json",
        "the complete operator tuple as JSON; its hash is the tuple's id",
        "",
        accept.Tuple | None,
    ),
)

VARIANT = (
    *_declared(Variant, without="dtype"),  # every table declares its own column `dtype`
    Column("model_flops", "integer", "operations of one pass, counted by PyTorch", "FLOP", accept.Count),
)
VARIANT = _accepting(VARIANT, text=accept.text(32), recompute=accept.text(10_000))
_SECOND = next(column for column in VARIANT if column.name == "weights")  # the column's position in all exports so far
VARIANT = (VARIANT[0], _SECOND, *(column for column in VARIANT[1:] if column is not _SECOND))
VARIANT_FIELDS = names_of(Variant)
#: Columns of the variant in the table of readings. They are null in readings of operators.
_VARIANT_OF_READING = tuple(one if one.kind == "text" else replace(one, accepts=None) for one in VARIANT)

CARD = _columns(
    ("card_id", "text", "the card: a GPU's UUID, or a name for a host's CPU", "", accept.text(80, 1)),
    ("card_model", "text", "the card model, such as NVIDIA H200", "", accept.Name),
    ("card_kind", "text", "kind of the card: cuda, cpu or simulated", "", Literal["cuda", "cpu", "simulated"]),
    ("card_memory_bytes", "integer", "memory of the card", "B", accept.Count),
    (
        "card_fingerprint",
        "json",
        "properties measured at the card's first use: peak rates, idle levels, sensors",
        "",
        accept.Object,
    ),
)

SOFTWARE = _accepting(_declared(Software), torch=accept.Name)

#: The column of `Protocol.data` is named data_class.
PROTOCOL = tuple(replace(one, name="data_class") if one.name == "data" else one for one in _declared(Protocol))


#: Columns with the same name in the database table of readings.
FIGURES = (
    *_declared(Reading),
    Column("simulated", "boolean", "the card was simulated: the figures describe no real card", "", bool),
    Column(
        "created_at_s",
        "number",
        "time at which the reading was stored, on the clock of its database",
        "s since 1970",
        accept.Positive,
    ),
)
FIGURES = _accepting(FIGURES, temperature_c=accept.Number | None)

_OF_BURST = [one for one in fields_of(Burst) if one.description]
#: Columns from a reading's details: column -> (part of the details or "", key).
IN_DETAILS: Mapping[str, tuple[str, str]] = {
    **{f"burst_{one.name}": ("burst", one.name) for one in _OF_BURST},
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
        ("dtype", "text", "data type of the arithmetic: that of the first floating-point tensor, or of the model"),
    ),
    *OPERATOR,
    *_VARIANT_OF_READING,
    *FIGURES,
    *_derived([Column(f"burst_{one.name}", "number", one.description, one.unit) for one in _OF_BURST]),
    *_columns(
        (
            "alone_time_us",
            "number",
            "time of one pass in a loop, with as many weights and inputs in the cache as possible",
            "µs",
        ),
        (
            "neighbours_effect_us",
            "number",
            "time that one pass takes longer because other operators run before it",
            "µs",
        ),
        ("neighbours_effect_half_width_us", "number", "half-width of the 95 % interval of neighbours_effect_us", "µs"),
        ("eager_time_us", "number", "time of one pass of a whole model with eager launch", "µs"),
        (
            "roofline_share",
            "number",
            "least time at the card's peak rates (from flops and bytes_moved), divided by the measured time",
            "1",
        ),
        derived=True,
    ),
    *_columns(
        (
            "kernels",
            "json",
            "kernel name -> launches in one call; empty if not observed on a card",
            "",
            accept.Numbers | None,
        ),
        ("flags", "texts", "warnings about the reading; docs/method.md explains each flag"),
        ("throttle_reasons", "texts", "reasons why the card reduced its clocks"),
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
        ("details", "json", "all other results of the measurement", "", accept.Details),
        ("cost_s", "json", "phase of the measurement -> time on the card", "s", accept.Numbers),
        ("origin", "text", "the farm from which the reading was imported; empty: measured by the exporting farm"),
    ),
)

_CAPTURE_ID = Column(
    "capture_id",
    "text",
    "hash of variant, device type, grad mode, torch, launch, the column captured and, if not empty, compiled_for",
    "",
    accept.Id,
)
_CAPTURED = (
    *_columns(
        ("device_type", "text", "device type of the capture: cuda or cpu", "", Literal["cuda", "cpu"]),
        ("grad", "boolean", "autograd recorded the pass", "", bool),
        ("torch", "text", "PyTorch version of the capture"),
        (
            "launch",
            "text",
            "launch of the captured pass: graph or eager (a graph may run other operators)",
            "",
            Literal["graph", "eager"],
        ),
        (
            "captured",
            "text",
            "predicted (captured without the card), or observed on a card",
            "",
            Literal["predicted", "observed"],
        ),
    ),
    Column("variant_id", "text", "the model variant", derived=True),
    Column("dtype", "text", "data type of the model"),
    *VARIANT,
)
_ORIGIN = Column("origin", "text", "the farm from which the capture was imported; empty: the exporting farm")

CALLS = (
    _CAPTURE_ID,
    *_derived(_CAPTURED),
    *_columns(
        ("call_index", "integer", "position of the call in the pass, from 0", "", accept.Count),
        ("module_path", "text", "module that makes the call, such as layer1.0.conv1", "", accept.Path),
        ("operator_id", "text", "id of the operator tuple; its readings have it as `subject_id`"),
        ("part", "text", "part of a training step: forward, backward, recomputation, accumulation, loss or optimizer"),
        (
            "owner",
            "text",
            "in a training step: the leaf module or function to which the call belongs, such as Conv2d",
            "",
            accept.Path,
        ),
        (
            "seen",
            "json",
            "statistics of the values of each activation in the running model; empty: unknown",
            "",
            accept.Seen | None,
        ),
        ("reads", "json", "numbers of the storages that the call reads", "", accept.Storages),
        ("writes", "json", "numbers of the storages that the call writes", "", accept.Storages),
    ),
    *_accepting(OPERATOR, operator_spec=accept.Tuple),
    replace(_ORIGIN, derived=True),
)

CAPTURES = (
    _CAPTURE_ID,
    *_CAPTURED,
    *_columns(
        ("flops", "integer", "operations of one pass: the sum over its calls", "FLOP", accept.Count),
        ("bytes_moved", "integer", "bytes that one pass moves: the sum over its calls", "B", accept.Count),
        ("card_id", "text", "the card that observed the pass; empty: predicted", "", accept.text(80)),
        ("verification", "json", "observation on a card: kernels, operators, time of each call", "", accept.Verified),
        ("created_at_s", "number", "time of the capture", "s since 1970", accept.Number),
        ("compiled_for", "text", "of a compiled model: the card model of its kernels; empty: not compiled"),
        ("compiled", "json", "choices of autotuning, and graph breaks by reason", "", accept.Compiled | None),
    ),
    _ORIGIN,
)

_NOTE, _SOME_NAMES = accept.text(1000, 1) | None, list[accept.Name] | None
VERDICTS = _columns(
    ("job_id", "text", "the job", "", accept.text(16, 1)),
    ("round", "integer", "number of the job's round", "", accept.Count),
    ("title", "text", "title of the job", "", _NOTE),
    ("job_kind", "text", "kind of the job: model or sweep", "", _NOTE),
    ("variant_id", "text", "the model variant; empty for a sweep", "", accept.Id | None),
    ("card_models", "texts", "card models of the job's cards"),
    ("launch", "text", "launch of the job's protocol: graph or eager", "", _NOTE),
    ("residency", "text", "residency of the job's protocol, as in readings", "", _NOTE),
    (
        "data_policy",
        "text",
        "seen: each call was measured with its own class of data; otherwise the one class of all calls",
        "",
        _NOTE,
    ),
    ("outcome", "text", "outcome of the verdict: pass, fail or none", "", _NOTE),
    ("target", "number", "accuracy and coverage that a verdict needs to pass", "1"),
    ("coverage", "number", "share of the estimated cost that was measured", "1"),
    ("accuracy_time", "number", "1 - |sum - whole| / whole, of the time", "1"),
    ("accuracy_energy", "number", "1 - |sum - whole| / whole, of the energy", "1"),
    ("sum_time_us", "number", "time of one pass: the sum of the parts", "µs"),
    ("sum_time_half_width_us", "number", "half-width of the 95 % interval of sum_time_us", "µs"),
    ("whole_time_us", "number", "time of one pass: the whole model", "µs"),
    ("whole_time_half_width_us", "number", "half-width of the 95 % interval of whole_time_us", "µs"),
    ("sum_energy_mj", "number", "energy of one pass: the sum of the parts", "mJ"),
    ("sum_energy_half_width_mj", "number", "half-width of the 95 % interval of sum_energy_mj", "mJ"),
    ("whole_energy_mj", "number", "energy of one pass: the whole model", "mJ"),
    ("whole_energy_half_width_mj", "number", "half-width of the 95 % interval of whole_energy_mj", "mJ"),
    ("parts", "integer", "number of operator tuples of the model"),
    ("measured", "integer", "number of operator tuples with a reading"),
    ("created_at_s", "number", "time of the verdict", "s since 1970"),
    ("details", "json", "the complete verdict as JSON", "", accept.VerdictDetails),
    ("request", "json", "the request of the job as JSON", "", accept.RequestText | None),
    ("capture_id", "text", "the capture whose calls the sum counts; empty for a sweep", "", accept.Id | None),
    ("operators", "texts", "operator types that the job measures; `all`: all types", "", _SOME_NAMES),
    (
        "made_of",
        "json",
        "readings of the verdict: id, role (tuple, whole, canary), round, reused",
        "",
        accept.MadeOf | None,
    ),
    ("origin", "text", "the farm from which the verdict was imported; empty: the exporting farm"),
)

TRACES = _columns(
    ("reading_id", "text", "the reading", "", accept.Id),
    ("series", "text", "name of the sampled quantity, with its unit", "", accept.Name),
    ("window_begin_s", "number", "begin of the window, on the time axis of the samples", "s", accept.Number),
    ("window_end_s", "number", "end of the window, on the time axis of the samples", "s", accept.Number),
    ("times_s", "numbers", "times of the samples since the begin of the warm-up", "s"),
    ("values", "numbers", "values of the samples; the name of the series has the unit"),
)

#: The columns that `farm predict dataset` writes: training data of predictors (`farm.prediction.dataset`).
DATASET = _columns(
    ("operator_id", "text", "the operator tuple"),
    "operator",
    ("operator_type", "text", "common name of the modules, functions and aten operators that do the same work"),
    ("operator_family", "text", "kind of the operator's kernels, such as convolution or pointwise"),
    "dtype data_class training flops bytes_moved flops_per_byte",
    ("m", "integer", "size m of a matrix product (m x k times k x n), also for a convolution"),
    ("n", "integer", "size n of this product"),
    ("k", "integer", "size k of this product"),
    ("products", "integer", "number of these products in one call: groups of a convolution, heads of an attention"),
    ("tiles", "integer", "number of output tiles of the products; 0 without a product"),
    ("waves", "number", "tiles divided by the number of the card's multiprocessors"),
    (
        "wave_share_64x64",
        "number",
        "tiles of 64 x 64 divided by the tiles that fill complete waves; 1 without a product",
        "1",
    ),
    ("wave_share_128x64", "number", "like wave_share_64x64, for tiles of 128 x 64", "1"),
    ("wave_share_256x128", "number", "like wave_share_64x64, for tiles of 256 x 128", "1"),
    ("roofline_us", "number", "least time at the card's peak rates, plus a launch", "µs"),
    ("tile_roofline_us", "number", "like roofline_us, but with complete waves of tiles and with the cache", "µs"),
    ("compute_us", "number", "arithmetic time of the tile roofline", "µs"),
    ("traffic_us", "number", "memory time of the tile roofline", "µs"),
    ("tensors", "integer", "number of the call's input tensors, including parameters"),
    ("itemsize_bytes", "integer", "size of one element", "B"),
    ("elements", "integer", "elements of the largest input or output tensor"),
    ("elements_given", "integer", "elements of all inputs of the call, without parameters"),
    ("parameter_bytes", "integer", "size of parameters and buffers", "B"),
    ("strided_share", "number", "share of the input elements in tensors that are not contiguous", "1"),
    ("expanded_share", "number", "1 - (elements of the smallest input tensor) / (elements of the largest)", "1"),
    ("written_share", "number", "share of bytes_moved that is not read from inputs", "1"),
    ("casts", "boolean", "an output or input has another dtype than the first input"),
    ("run_bytes", "integer", "bytes that are contiguous in memory: the minimum over the input tensors", "B"),
    ("casts_to_whole", "boolean", "the call names an integer or boolean dtype for its output"),
    ("masked", "number", "mask of an attention: 0.5 boolean, 1 numbers, 0 none"),
    ("causal", "boolean", "an attention in which each position uses only earlier positions"),
    ("drops", "boolean", "an attention with dropout"),
    ("materialised", "boolean", "an attention that writes its scores, because of its mask, sizes or shared keys"),
    (
        "along_last",
        "number",
        "1: the operator works along the last dimension; 0: along others; 0.5: it has no such parameter",
    ),
    ("along", "integer", "elements along the dimensions that the parameters name"),
    ("last_size", "integer", "last size of the first tensor; for an embedding, its width"),
    ("rows", "integer", "elements of the first tensor divided by its last size; for an embedding, the requested rows"),
    ("batch", "integer", "first size of the first tensor"),
    ("window", "integer", "elements of the kernel of a convolution or pool"),
    ("stride", "integer", "product of the strides of a convolution or pool"),
    ("dilation", "integer", "product of the dilations of a convolution or pool"),
    ("channels_in", "integer", "channels of the input image"),
    ("channels_out", "integer", "channels of the output image, if known"),
    ("pixels", "integer", "pixels of the input image"),
    ("zeros", "number", "share of zeros in the class of data: the mean over the activations", "1"),
    ("positive", "number", "share of the activation tensors without negative values", "1"),
    ("channels", "number", "share of the variance that is between channels: the mean over the activations", "1"),
    ("data_known", "boolean", "the class of data is known"),
    "reading_id time_us time_half_width_us",
    ("power_w", "number", "mean power, energy divided by time; empty if the card has no power sensor", "W"),
    "energy_mj energy_half_width_mj",
    ("neighbours_us", "number", "time that one pass takes longer because other operators run before it", "µs"),
    (
        "fetching_us",
        "number",
        "the part of neighbours_us for fetching weights, which a small model finds in the cache",
        "µs",
    ),
    "flags",
    ("kernels", "texts", "kernels of one call, if imported with the reading; predictors do not use them"),
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
    "readings": _OF_A_VARIANT | {"placement": "", "cards": 1, "communication": "", "output_shapes": None},
    "captures": _OF_A_VARIANT | {"compiled_for": "", "compiled": None},
    "calls": _OF_A_VARIANT | {"part": "", "owner": "", "output_shapes": None},
}

_ONE_ROW_IS = {
    "readings": "one reading: a subject, a card, software and a protocol, with the result",
    "calls": "one operator call of a captured model, in order",
    "captures": "one capture of a model variant",
    "verdicts": "the sum of the parts compared with the whole model, for one round of a job",
    "traces": "one sampled series of one reading (only with `--traces`)",
    "dataset": "one operator tuple with the features of predictors (`farm predict dataset`; not part of an export)",
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

The tables of `farm export`, format {FORMAT}. A half-width is half of a 95 % interval. The unit 1 marks a fraction. A
value that could not be measured is empty, never zero. A list is a list in Parquet and JSON Lines; in CSV its values are
joined by `x` (numbers) or `;` (texts). JSON is text in Parquet and CSV. In Parquet, each field's metadata holds its
unit and meaning.
"""
    for table, columns in {**TABLES, "dataset": DATASET}.items():
        text += f"\n## {table}\n\nOne row is {_ONE_ROW_IS[table]}.\n\n"
        text += "| column | type | unit | meaning |\n| --- | --- | --- | --- |\n"
        text += "".join(f"| `{one.name}` | {one.kind} | {one.unit} | {one.meaning} |\n" for one in columns)
    return text


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
