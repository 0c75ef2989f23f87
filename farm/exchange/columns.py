"""What an export holds: every column of every table, declared once, with its type, its unit and what it means.

The Parquet schema, the data dictionary beside an export, the documentation and the names that filters take are made of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from farm.types.protocol import Variant

FORMAT = 1  # raised when a column changes its meaning or goes; a new column leaves it as it is

Kind = Literal["text", "integer", "number", "boolean", "integers", "numbers", "texts", "json"]


@dataclass(frozen=True)
class Column:
    """One column. `json` is a text that holds JSON; `integers`, `numbers` and `texts` are lists."""

    name: str
    kind: Kind
    meaning: str
    unit: str = ""


def _columns(*rows: tuple[str, ...]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)  # type: ignore[arg-type]


#: Parameters of modules that are columns; what else an operator was made or called with stands in `parameters`.
PARAMETERS = _columns(
    ("in_channels", "integer", "channels that go in"),
    ("out_channels", "integer", "channels that come out"),
    ("kernel_size", "integers", "of a convolution or pool, a size for each dimension"),
    ("stride", "integers", "of a convolution or pool, for each dimension"),
    ("padding", "integers", "of a convolution or pool, for each dimension; empty where it was given in words"),
    ("dilation", "integers", "of a convolution or pool, for each dimension"),
    ("groups", "integer", "groups of channels of a convolution"),
    ("bias", "boolean", "whether it adds a bias"),
    ("in_features", "integer", "features that go in"),
    ("out_features", "integer", "features that come out"),
    ("num_features", "integer", "features that are normalised"),
    ("normalized_shape", "integers", "the last dimensions, over which it normalises"),
    ("num_groups", "integer", "groups of channels that are normalised"),
    ("embed_dim", "integer", "of an attention"),
    ("num_heads", "integer", "of an attention"),
    ("hidden_size", "integer", "of a recurrent layer"),
    ("num_layers", "integer", "of a recurrent layer"),
    ("num_embeddings", "integer", "rows of an embedding's table"),
    ("embedding_dim", "integer", "columns of an embedding's table"),
    ("output_size", "integers", "of an adaptive pool, for each dimension"),
    ("inplace", "boolean", "whether it writes into its input"),
)

OPERATOR = (
    *_columns(
        ("operator", "text", "the operator's short name, such as Conv2d"),
        ("operator_name", "text", "its full name, such as torch.nn.Conv2d"),
        ("label", "text", "one line for people; never parse it"),
        ("training", "boolean", "whether the module was in training mode"),
        ("input_shape", "integers", "of the first tensor that the call is given"),
        ("input_shapes", "json", "of all tensors that the call is given, in order"),
        ("output_shape", "integers", "of what comes out; empty for operators whose rule the farm does not know"),
        ("m", "integer", "of a product of m x k by k x n"),
        ("n", "integer", "of a product of m x k by k x n"),
        ("k", "integer", "of a product of m x k by k x n"),
        ("products", "integer", "how many such products one call makes"),
    ),
    *PARAMETERS,
    *_columns(
        ("parameters", "json", "all that the operator was made and called with beside its tensors"),
        ("flops", "integer", "of one call: 2 for each multiply-add of products, convolutions, attention", "FLOP"),
        ("bytes_moved", "integer", "what one call must read and write at least once", "B"),
        ("flops_per_byte", "number", "arithmetic intensity: flops / bytes_moved", "FLOP/B"),
        ("operator_spec", "json", "the whole description, which the operator's id is the hash of"),
    ),
)

VARIANT = _columns(
    ("model", "text", "the model's name"),
    ("weights", "text", "where its weights come from"),
    ("batch", "integer", "batch size"),
    ("input_size", "integer", "height and width of the input; 0 of a model that takes no images", "px"),
    ("memory_format", "text", "contiguous or channels_last"),
    ("mode", "text", "eval or train"),
    ("length", "integer", "of each sequence in the batch: tokens, or a sound's values; 0 of a model that takes none"),
    ("padded", "boolean", "whether the sequences are shorter than that, filled up and masked"),
    ("phase", "text", "of a model of tokens: encode, prefill or decode"),
    ("cache", "integer", "tokens that the caches of a decode pass have room for; 0 elsewhere"),
    ("layers", "integer", "layers kept of the model; 0 all"),
    ("text", "text", "the content id of the tokens; empty: of the farm's own text"),
    ("step", "text", "training: one iteration of it; empty: the forward alone"),
    ("optimizer", "text", "of a step: sgd, adam or adamw, with -foreach or -fused behind it"),
    ("amp", "text", "of a step: what autocast computes in"),
    ("accumulate", "integer", "of a step: passes before the optimizer"),
    ("recompute", "text", "of a step: the modules that are run anew in the backward"),
    ("model_flops", "integer", "of one pass, by PyTorch's own counter", "FLOP"),
)

#: The columns that a variant is made of again.
OF_VARIANT = tuple(entry.name for entry in dataclasses.fields(Variant))

CARD = _columns(
    ("card_id", "text", "the card: a GPU's UUID, or a name for a host's CPU"),
    ("card_model", "text", "its model, such as NVIDIA H200"),
    ("card_kind", "text", "cuda, cpu or simulated"),
    ("card_memory_bytes", "integer", "its memory", "B"),
    ("card_fingerprint", "json", "what was measured when a worker first saw it: peaks, idle levels, sensors"),
)

SOFTWARE = _columns(
    ("torch", "text", "version"),
    ("torchvision", "text", "version"),
    ("cuda", "text", "version that torch was built with"),
    ("cudnn", "text", "version"),
    ("driver", "text", "version"),
    ("python", "text", "version; not part of the software's identity"),
    ("platform", "text", "the host's system; not part of the software's identity"),
)

PROTOCOL = _columns(
    ("launch", "text", "graph (CUDA graphs) or eager"),
    ("residency", "text", "which data lay in the cache when a pass began: resident, reuse, stream or chain"),
    ("data_class", "text", "what stood in the inputs: normal, zeros, or a class of what running models show"),
    ("grad", "boolean", "whether autograd recorded"),
    ("tf32", "boolean", "whether float32 products might run as TF32"),
    ("cudnn_benchmark", "boolean", "whether cuDNN tried kernels out"),
    ("cudnn_deterministic", "boolean", "whether cuDNN was to be deterministic"),
    ("placement", "text", "which of a tuple's tensors lay in slow memory (in0+out0); empty: none"),
)

#: Columns of a reading that the database has under the same names.
FIGURES = _columns(
    (
        "time_us",
        "number",
        "one pass: the mean over the window (the median where there is no power to go with it)",
        "µs",
    ),
    ("time_half_width_us", "number", "half of its 95 % interval", "µs"),
    ("time_median_us", "number", "median over the window", "µs"),
    ("time_trimmed_us", "number", "mean without what lies beyond three standard deviations", "µs"),
    ("passes", "integer", "in the window"),
    ("window_s", "number", "length of the window", "s"),
    ("warm_up_s", "number", "length of the warm-up", "s"),
    ("power_w", "number", "mean over the window; empty where the card has no sensor", "W"),
    ("power_half_width_w", "number", "half of its 95 % interval", "W"),
    ("power_source", "text", "energy_counter, instant_power, average_power, rapl or simulated"),
    ("energy_mj", "number", "one pass, gross", "mJ"),
    ("energy_half_width_mj", "number", "half of its 95 % interval", "mJ"),
    ("idle_power_w", "number", "the card at rest", "W"),
    ("base_power_w", "number", "the card at full clocks with nothing to do", "W"),
    ("sm_clock_mhz", "number", "mean clock of the multiprocessors", "MHz"),
    ("memory_clock_mhz", "number", "mean clock of the memory", "MHz"),
    ("temperature_c", "number", "mean temperature", "°C"),
    ("simulated", "boolean", "whether the card was simulated: such a figure is of no card"),
    ("created_at_s", "number", "when it was written, on its database's clock", "s since 1970"),
)

#: Columns of a reading that are found in its details.
FOUND = _columns(
    ("burst_time_us", "number", "one pass in bursts at full clocks, where the loop hits the power limit", "µs"),
    ("burst_time_half_width_us", "number", "half of its 95 % interval", "µs"),
    ("burst_power_w", "number", "power in bursts", "W"),
    ("burst_energy_mj", "number", "one pass in bursts", "mJ"),
    ("burst_energy_half_width_mj", "number", "half of its 95 % interval", "mJ"),
    ("burst_sm_clock_mhz", "number", "clock in bursts", "MHz"),
    ("alone_time_us", "number", "one pass looped, weights and inputs as warm as they get", "µs"),
    ("neighbours_effect_us", "number", "what other operators before it add to one pass", "µs"),
    ("neighbours_effect_half_width_us", "number", "half of its 95 % interval", "µs"),
    ("eager_time_us", "number", "of a whole model: one pass launched eagerly", "µs"),
)

READINGS = (
    *_columns(
        ("reading_id", "text", "the reading"),
        ("subject_kind", "text", "operator: of an operator tuple; variant: of a whole model"),
        ("subject_id", "text", "the tuple or the model variant, a hash of its description"),
        ("dtype", "text", "of the arithmetic: that of the first floating tensor, or of the model"),
    ),
    *OPERATOR,
    *VARIANT,
    *FIGURES,
    *FOUND,
    *_columns(
        ("roofline_share", "number", "the least time at the card's peaks, by FLOPs and bytes, over the time read", "1"),
        ("kernels", "json", "the kernels that one call launches, with how often, where a card was looked at"),
        ("flags", "texts", "what a reader should know of it: the method's documentation explains each"),
        ("throttle_reasons", "texts", "why the card held its clocks back"),
        ("method", "integer", "version of the way of measuring; readings of two are not held against each other"),
        ("card_time_s", "number", "what the card was held for it, everything included", "s"),
    ),
    *CARD,
    *SOFTWARE,
    *PROTOCOL,
    *_columns(
        ("details", "json", "all that was found beside the figures"),
        ("cost_s", "json", "where the card's time went", "s"),
        ("origin", "text", "the farm that it was imported from; empty: measured by the farm that exported it"),
    ),
)

_OF_VARIANT = (*_columns(("variant_id", "text", "the model variant"), ("dtype", "text", "of the model")), *VARIANT)
_OF_CAPTURE = _columns(
    ("capture_id", "text", "the taking-apart: a hash of variant, device, grad mode, torch, launch and kind"),
    ("device_type", "text", "cuda or cpu"),
    ("grad", "boolean", "whether autograd recorded"),
    ("torch", "text", "version that took it apart"),
    ("launch", "text", "graph or eager: a model may run other operators in a CUDA graph"),
    ("captured", "text", "predicted, or observed on a card where that differs"),
)
_ORIGIN = _columns(("origin", "text", "the farm that it was imported from; empty: of the farm that exported it"))

CALLS = (
    *_OF_CAPTURE,
    *_OF_VARIANT,
    *_columns(
        ("call_index", "integer", "position in the pass, from 0"),
        ("module_path", "text", "where in the model, such as layer1.0.conv1"),
        ("operator_id", "text", "the operator tuple; `subject_id` of its readings"),
        ("part", "text", "of a training step: forward, backward, recomputation, accumulation, loss or optimizer"),
        ("owner", "text", "of a training step: the leaf module or function whose part it is, such as Conv2d"),
        ("seen", "json", "what each activation held when the model ran; empty: not looked at"),
        ("reads", "json", "storages that it reads"),
        ("writes", "json", "storages that it writes"),
    ),
    *OPERATOR,
    *_ORIGIN,
)

CAPTURES = (
    *_OF_CAPTURE,
    *_OF_VARIANT,
    *_columns(
        ("flops", "integer", "of one pass, by its tuples", "FLOP"),
        ("bytes_moved", "integer", "of one pass, by its tuples", "B"),
        ("card_id", "text", "the card that it was observed on"),
        ("verification", "json", "what a card said of it: kernels, operators, what each call took"),
        ("created_at_s", "number", "when it was taken apart", "s since 1970"),
    ),
    *_ORIGIN,
)

VERDICTS = _columns(
    ("job_id", "text", "the job"),
    ("round", "integer", "of the job"),
    ("title", "text", "of the job"),
    ("job_kind", "text", "model or sweep"),
    ("variant_id", "text", "the model variant; empty for a sweep"),
    ("card_models", "texts", "the models of the cards it was read on"),
    ("launch", "text", "graph or eager"),
    ("residency", "text", "as of readings"),
    ("data_policy", "text", "seen: each call under its own class of data; else that class"),
    ("outcome", "text", "pass, fail or none"),
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
    ("measured", "integer", "of them, those that were read"),
    ("created_at_s", "number", "when it was given", "s since 1970"),
    ("details", "json", "the whole verdict"),
    ("request", "json", "what the job asked for"),
    ("capture_id", "text", "the taking-apart that calls are counted by; empty for a sweep"),
    ("operators", "texts", "operator types in scope; all of them where it says all"),
    (
        "made_of",
        "json",
        "its readings: of each the id, its role (tuple, whole, canary), its round, and whether it was reused",
    ),
    ("origin", "text", "the farm that it was imported from; empty: of the farm that exported it"),
)

TRACES = _columns(
    ("reading_id", "text", "the reading"),
    ("series", "text", "what was sampled, with its unit in the name"),
    ("window_begin_s", "number", "begin of the window on the axis of the samples", "s"),
    ("window_end_s", "number", "end of the window on the axis of the samples", "s"),
    ("times_s", "numbers", "when, since the warm-up began", "s"),
    ("values", "numbers", "what, in the unit that the series' name ends with"),
)

#: What `farm predict dataset` writes: readings as predictors learn from them (`farm.prediction.dataset`).
LEARNT_FROM = (
    *_columns(
        ("operator_id", "text", "the operator tuple"),
        ("operator", "text", "the operator's short name, such as Conv2d"),
        ("operator_type", "text", "the name that modules, functions and aten operators of the same work share"),
        ("operator_family", "text", "the sort of kernels that it runs, such as convolution or pointwise"),
        ("dtype", "text", "of the arithmetic: that of the first floating tensor"),
        ("data_class", "text", "what stood in the inputs"),
        ("training", "boolean", "whether the module was in training mode"),
        ("flops", "integer", "of one call: 2 for each multiply-add of products, convolutions, attention", "FLOP"),
        ("bytes_moved", "integer", "what one call must read and write at least once", "B"),
        ("flops_per_byte", "number", "arithmetic intensity: flops / bytes_moved", "FLOP/B"),
        ("m", "integer", "of a product of m x k by k x n, that of a convolution included"),
        ("n", "integer", "of such a product"),
        ("k", "integer", "of such a product"),
        (
            "products",
            "integer",
            "how many such products one call makes: groups of a convolution, heads of an attention",
        ),
        ("tiles", "integer", "that the products are cut into; 0: it makes none"),
        ("waves", "number", "of tiles over the card's multiprocessors"),
        (
            "wave_share_64x64",
            "number",
            "tiles of 64 x 64 over what whole waves of them would be; 1: it makes no product",
            "1",
        ),
        ("wave_share_128x64", "number", "of tiles of 128 x 64", "1"),
        ("wave_share_256x128", "number", "of tiles of 256 x 128", "1"),
        ("roofline_us", "number", "the least time at the card's peaks, a launch included", "µs"),
        ("tile_roofline_us", "number", "the same in whole waves of tiles, and with the cache", "µs"),
        ("compute_us", "number", "of the tile roofline, the arithmetic", "µs"),
        ("traffic_us", "number", "of the tile roofline, the bytes", "µs"),
        ("tensors", "integer", "that it is given, parameters included"),
        ("itemsize_bytes", "integer", "of one element", "B"),
        ("elements", "integer", "of the largest tensor, in or out"),
        ("elements_given", "integer", "of all tensors that the call is given"),
        ("parameter_bytes", "integer", "of parameters and buffers", "B"),
        ("strided_share", "number", "of the elements given, those in tensors that are not contiguous", "1"),
        ("expanded_share", "number", "1 - the least tensor given over the largest", "1"),
        ("written_share", "number", "of the bytes moved, those beyond what it is given", "1"),
        ("casts", "boolean", "whether what comes out, or a tensor given, is of another dtype than the first"),
        ("run_bytes", "integer", "that follow one another in memory, the least over the tensors given", "B"),
        ("casts_to_whole", "boolean", "whether what comes out is named to be whole numbers or booleans"),
        ("masked", "number", "of an attention: 0.5 with a mask of booleans, 1 with one of numbers, 0 without"),
        ("causal", "boolean", "of an attention: whether each position sees those before it alone"),
        ("drops", "boolean", "of an attention: whether it leaves scores out at random"),
        (
            "materialised",
            "boolean",
            "an attention that writes its scores out, for its mask, its dimensions or the keys that its heads share",
        ),
        ("along_last", "number", "1: it works along the last dimension; 0: along others; 0.5: it names none"),
        ("along", "integer", "elements along the dimensions that it names"),
        ("last_size", "integer", "of the first tensor; of an embedding its width"),
        ("rows", "integer", "elements of the first tensor over its last size; of an embedding those asked for"),
        ("batch", "integer", "the first size of the first tensor"),
        ("window", "integer", "elements of a convolution's or pool's kernel"),
        ("stride", "integer", "elements of its step"),
        ("dilation", "integer", "elements of its dilation"),
        ("channels_in", "integer", "of an image"),
        ("channels_out", "integer", "of an image, where it is known"),
        ("pixels", "integer", "of an image that goes in"),
        ("zeros", "number", "share of zeros by the class of data, the mean over activations", "1"),
        ("positive", "number", "of the activations, the share of those without a negative value", "1"),
        ("channels", "number", "mean share of the variance that lies between channels", "1"),
        ("data_known", "boolean", "whether the class of data is known"),
        ("reading_id", "text", "the reading"),
        ("time_us", "number", "one pass, looped", "µs"),
        ("time_half_width_us", "number", "half of its 95 % interval", "µs"),
        ("power_w", "number", "energy over time; empty where the card has no sensor", "W"),
        ("energy_mj", "number", "one pass, gross", "mJ"),
        ("energy_half_width_mj", "number", "half of its 95 % interval", "mJ"),
        ("neighbours_us", "number", "what other operators before it add to one pass", "µs"),
        (
            "fetching_us",
            "number",
            "of it, what fetching weights takes that a model smaller than the cache finds there",
            "µs",
        ),
        ("flags", "texts", "what a reader should know of the reading"),
        ("kernels", "texts", "that one call launched, where they were imported with it; never learnt from"),
    ),
    *(entry for entry in CARD if entry.name == "card_model"),
    *(entry for entry in SOFTWARE if entry.name in ("torch", "cuda", "cudnn", "driver")),
    *_columns(("method", "integer", "version of the way of measuring")),
    *(entry for entry in PROTOCOL if entry.name in ("launch", "residency", "tf32")),
    *_columns(("features_version", "integer", "version of the columns that predictors look at")),
)

TABLES: Mapping[str, tuple[Column, ...]] = {
    "readings": READINGS,
    "calls": CALLS,
    "captures": CAPTURES,
    "verdicts": VERDICTS,
    "traces": TRACES,
}

#: What files of this format may lack, since it came later, and what it is then, as far as that can be said.
_OF_A_STEP = {"step": "", "optimizer": "", "amp": "", "accumulate": 1, "recompute": ""}
_OF_TOKENS = {"length": 0, "padded": False, "phase": "", "cache": 0, "layers": 0, "text": ""}
ADDED: Mapping[str, Mapping[str, Any]] = {
    "verdicts": dict.fromkeys(["request", "capture_id", "operators", "made_of"]),
    "readings": _OF_TOKENS | _OF_A_STEP | {"placement": ""},
    "captures": _OF_TOKENS | _OF_A_STEP,
    "calls": _OF_TOKENS | _OF_A_STEP | {"part": "", "owner": ""},
}

_ONE_ROW_IS = {
    "readings": "one reading: a subject, a card, software and a protocol, with what came out",
    "calls": "one operator call of a model that was taken apart, in order",
    "captures": "one taking-apart of a model variant",
    "verdicts": "the sum of the parts held against the whole, for one round of a job",
    "traces": "one sampled series of one reading (only with `--traces`)",
    "dataset": "one operator tuple as predictors learn from it (`farm predict dataset`, no part of an export)",
}


def as_markdown() -> str:
    """The data dictionary, for people."""
    lines = [
        "# Data dictionary",
        "",
        f"What `farm export` writes, format {FORMAT}. Half-widths are of the 95 % interval; a unit of 1 is a fraction. What",
        "could not be measured is empty, never zero. Lists are lists in Parquet and JSON Lines, and joined by `x` (numbers) or",
        "`;` (texts) in CSV; JSON is a text in Parquet and CSV. In Parquet, unit and meaning stand in each field's metadata.",
    ]
    for table, columns in {**TABLES, "dataset": LEARNT_FROM}.items():
        lines += ["", f"## {table}", "", f"One row is {_ONE_ROW_IS[table]}.", ""]
        lines += ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
        lines += [f"| `{entry.name}` | {entry.kind} | {entry.unit} | {entry.meaning} |" for entry in columns]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
