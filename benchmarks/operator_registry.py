"""Make the list of overloads of aten that a tuple may name, farm/subjects/aten_overloads.txt, and the table
of the forward calls of backward operators, farm/subjects/backward_calls.toml.

The list is made from PyTorch's own registry, `native_functions.yaml` with its tags and kernels, as
`torchgen` reads it. Each overload is either allowed or denied with a reason. A reason is a property of the
overload (`RULES`); the first rule that applies counts. What one version denies is denied in all.

    python benchmarks/operator_registry.py                          # of the installed torch, and print counts
    python benchmarks/operator_registry.py 2.11=/tmp/torch-2.11 --write

`2.11=FOLDER` adds another version: `torchgen/` of its wheel, for any platform, in a folder. Without it,
overloads that only other versions have stay as the present list has them.

    pip download --no-deps --only-binary=:all: --platform macosx_11_0_arm64 torch==2.11.0
    unzip torch-2.11.0-*.whl 'torchgen/*' -d /tmp/torch-2.11
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from farm.subjects.overloads import (
    BY_ELEMENT,
    GENERATED,
    NOT_READ,
    OTHER_ARGUMENTS,
    OTHER_TENSORS,
    TAKEN_APART,
    listed,
)

LIST = Path(__file__).resolve().parent.parent / "farm/subjects/aten_overloads.txt"
CALLS = LIST.with_name("backward_calls.toml")
HEADER = """\
# The overloads of aten, of PyTorch {versions}. Made by benchmarks/operator_registry.py: do not edit.
# A name without a dot means the overload `default`. What no line names is refused, too.
"""


@dataclass(frozen=True)
class Overload:
    """What the registry says of one overload."""

    name: str  # `add.Tensor`; `relu` for its overload `default`
    types: tuple[str, ...]  # of the arguments, without list and `?`: `Tensor`
    texts: tuple[str, ...]  # names of the arguments that are texts
    kernels: tuple[str, ...]  # the dispatch keys that it has kernels for: `CPU`
    tags: tuple[str, ...]  # `inplace_view`
    is_view: bool  # returns a view of an argument
    writes: bool  # writes an argument
    returns: tuple[str, ...]  # types: `Tensor`

    @property
    def packet(self) -> str:
        return self.name.partition(".")[0]

    def has_kernel(self, *keys: str) -> bool:
        return bool(set(keys) & set(self.kernels))


#: Types of arguments that JSON of a tuple can contain. A generator can only be absent.
PLAIN_TYPES = {
    *("Tensor", "int", "SymInt", "bool", "float", "Scalar", "str"),
    *("ScalarType", "Layout", "Device", "MemoryFormat", "Generator?"),
}
#: Arguments that are a text of a set: `farm.subjects.scalars` has the values.
ENUMERATED = {"approximate", "reduce", "rounding_mode", "side", "ord", "driver", "UPLO", "mode"}
#: Have a kernel of their own on a card, or an audit on a card has seen them, although they can be
#: taken apart.
NOT_TAKEN_APART = frozenset(["_pack_padded_sequence_backward"])
#: Return values to the host: a step waits for them.
RETURN_TO_HOST = frozenset(["_local_scalar_dense", "equal"])
#: `farm.operators.output_sizes` bounds the size, and a rule of the worker chooses the values.
SIZE_HAS_RULE = frozenset(
    [
        "index.Tensor",
        "_ctc_loss",
        "nonzero",
        "masked_select",
        "bincount",
        "repeat_interleave.Tensor",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    ]
)
#: Variants that the code generator adds, and that a capture has seen.
SEEN_GENERATED = frozenset(["randint.low_out", "split_with_sizes_copy.out", "_chunk_cat.out"])

#: Their weights are plain tensors of integers, and `farm.subjects.shapes` checks their sizes.
PACKED = frozenset(["_weight_int4pack_mm", "_weight_int8pack_mm"])

_SPECIAL = re.compile(
    "sparse|nested|jagged|quantiz|mkldnn|mkl_|fbgemm|miopen|_mps|xnnpack|vulkan|_cslt|nnpack|coalesce"
    "|qint|_int4|_int8|dyn_quant|fake_quant|_obs_|to_padded|_cufft"
)
_MEMORY = re.compile(
    "_?(set|resize|resize_as|as_strided|from_file|lift|copy_from|to_cpu|pin_memory|empty|new_empty_strided"
    "|reshape_alias|lazy_clone|neg_view|storage|has_same|data|detach|alias|unsafe_view|unsafe_split"
    "|unsafe_chunk|dim_arange|rename|align)(_|$)"
)
_STATE = re.compile(
    "_?(cudnn_init|manual|seed|record_stream|requires_grad|retain_grad|backward$|make_dual|fw_primal"
    "|unpack_dual|new_zeros_with_same|test|assert|functional_assert|debug|async|foobar|print|warn|make_dep"
    "|functional_sym|sym_|propagate|validate|version|use_cudnn|addmm_tunable"
    "|fill_mem_eff|cudnn_attention|sobol)"
)
#: Private operators (`_name`) of which somebody has read what they check. All others are denied.
REVIEWED = re.compile(
    "_(foreach_|fused_(adam|adamw|sgd|adagrad)_|fused_rms_norm|softmax|log_softmax|safe_softmax"
    "|adaptive_avg_pool|upsample_|linalg_(det|eigh|eigvals|slogdet|solve_ex|svd)|fft_|embedding_bag"
    "|ctc_loss|pdist|cdist|prelu_kernel|trilinear|native_batch_norm_legit|batch_norm_with_update"
    "|weight_norm_interface|scaled_dot_product|addmm_activation|int_mm|scaled_mm|grouped_mm|to_copy"
    "|weight_int[48]pack_mm$|amp_|chunk_cat|local_scalar_dense|unsafe_index|index_put_impl|pack_padded_sequence|stack"
    "|logcumsumexp|euclidean_dist|conj_physical|masked_softmax|masked_scale|unique2"
    "|is_(all|any)_true|standard_gamma|sample_dirichlet|dirichlet_grad|thnn_fused_(lstm|gru)_cell"
    "|cudnn_rnn(_backward)?$)"
)

#: Backward operators that compare all sizes themselves; their forwards do not run on meta.
COMPARES_SIZES = frozenset(["_thnn_fused_gru_cell_backward"])

#: Public ones that check little, because other operators call them: also denied.
UNCHECKED = re.compile(
    r"cudnn_(?!batch_norm)|\w+_overrideable|conv_depthwise|batch_norm_(elemt|stats|update|gather"
    "|backward_elemt|backward_reduce)|(ccol|col|crow|row)_indices_copy|(indices|values)_copy|segment_reduce|glu_\\w*jvp"
)

Rule = Callable[[Overload], object]
#: Reason -> the property that denies an overload.
RULES: dict[str, Rule] = {
    OTHER_ARGUMENTS: lambda one: set(one.types) - PLAIN_TYPES,
    "takes a text that is not of a set": lambda one: set(one.texts) - ENUMERATED,
    OTHER_TENSORS: lambda one: (
        (_SPECIAL.search(one.name) and one.name not in PACKED)
        or not any(key in ("CPU", "CUDA") or key.startswith("Composite") for key in one.kernels)
    ),
    TAKEN_APART: lambda one: (
        one.has_kernel("CompositeImplicitAutograd")
        and not one.has_kernel("CPU", "CUDA")
        and one.name not in NOT_TAKEN_APART
    ),
    "changes, shares or only allocates memory": lambda one: (
        _MEMORY.match(one.packet) or "inplace_view" in one.tags
    ),
    "belongs to autograd or changes the state of the process": lambda one: _STATE.match(one.packet),
    "returns a view, without work": lambda one: one.is_view and not one.writes,
    "returns no tensor": lambda one: (
        not one.writes
        and not any("Tensor" in kind for kind in one.returns)
        and one.packet not in RETURN_TO_HOST
    ),
    "has an output whose size depends on values": lambda one: (
        {"dynamic_output_shape", "data_dependent_output"} & set(one.tags)
        and one.name not in RETURN_TO_HOST | SIZE_HAS_RULE
    ),
    GENERATED: lambda one: "generated" in one.tags and one.name not in SEEN_GENERATED,
    NOT_READ: lambda one: (
        UNCHECKED.match(one.name) or (one.name.startswith("_") and not REVIEWED.match(one.name))
    ),
}


def reason_of(overload: Overload) -> str:
    """Why the overload is denied; "" if it is allowed."""
    return next((reason for reason, applies in RULES.items() if applies(overload)), "")


def computes_by_element(overload: Overload, tagged: Collection[str]) -> bool:
    """True if its integers are only operands. ``tagged``: the packets with such a tag; variants in place
    and on lists of tensors have none."""
    plain = overload.packet.removeprefix("_foreach_").rstrip("_")
    return (plain in tagged and "backward" not in plain) or "view_copy" in overload.tags


def tagged_packets(overloads: Iterable[Overload]) -> set[str]:
    tags = {"pointwise", "reduction"}
    return {one.packet.rstrip("_") for one in overloads if tags & set(one.tags)}


def overloads_of_this_torch() -> list[Overload]:
    """All overloads of aten that the `torchgen` of this process knows."""
    import torchgen
    from torchgen.gen import parse_native_yaml

    files = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(files / "native_functions.yaml"), str(files / "tags.yaml"))
    kernels = defaultdict(set)
    for key, index in parsed.backend_indices.items():
        for name in index.index:
            kernels[str(name)].add(str(key))
    overloads = []
    for function in parsed.native_functions:
        schema, types, texts = function.func, set(), []
        for argument in schema.schema_order_arguments():
            kind = str(argument.type)
            plain = re.sub(r"\[\d*\]|\?", "", kind)
            types.add("Generator?" if kind == "Generator?" else plain)
            if plain == "str":
                texts.append(argument.name)
        written = any(
            argument.annotation is not None and argument.annotation.is_write
            for argument in schema.schema_order_arguments()
        )
        own = kernels[str(schema.name)] | kernels[str(function.structured_delegate)]
        overloads.append(
            Overload(
                name=str(schema.name),
                types=tuple(sorted(types)),
                texts=tuple(texts),
                kernels=tuple(sorted(own)),
                tags=tuple(sorted(function.tags)),
                is_view=function.is_view_op,
                writes=written,
                returns=tuple(str(value.type) for value in schema.returns),
            )
        )
    return overloads


def overloads_of(folder: str) -> list[Overload]:
    """Those of another version: `torchgen` is a package of its own there, so another process reads it."""
    command = [sys.executable, "-B", __file__, "--print-registry"]
    text = subprocess.run(
        command, env={"PYTHONPATH": folder}, check=True, capture_output=True, text=True
    ).stdout
    return [
        Overload(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in entry.items()
            }
        )
        for entry in json.loads(text)
    ]


def merged(versions: Mapping[str, list[Overload]], present: Mapping[str, str]) -> dict[str, str]:
    """Name -> reason, "" if allowed. A name that no given version has stays as in the present list."""
    reasons = dict(present)
    for name in {one.name for overloads in versions.values() for one in overloads}:
        reasons.pop(name, None)
    for version in sorted(versions, reverse=True):  # the reason of the newest version counts
        for one in versions[version]:
            reasons[one.name] = reasons.get(one.name) or reason_of(one)
    return reasons


def text_of(reasons: Mapping[str, str], by_element: Collection[str], versions: str) -> str:
    names = defaultdict(list)
    for name, reason in sorted(reasons.items()):
        title = f"denied: {reason}" if reason else "allowed"
        names[BY_ELEMENT if not reason and name in by_element else title].append(name)
    parts = [HEADER.format(versions=versions)]
    for title in (BY_ELEMENT, "allowed", *(f"denied: {reason}" for reason in RULES)):
        wrapped = textwrap.fill(
            " ".join(names[title]), 120, break_long_words=False, break_on_hyphens=False
        )
        parts.append(f"[{title}]\n{wrapped}\n")
    return "\n".join(parts)


def backward_calls() -> dict[str, list[str]]:
    """Backward operator -> its forward, and what each of its arguments is there: an argument
    (`input`), its sizes (`sizes input`), or an output (`output 1`). From `derivatives.yaml`."""
    import torchgen
    import yaml

    file = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    names = {overload.packet for overload in overloads_of_this_torch() if not reason_of(overload)}
    names -= COMPARES_SIZES
    calls: dict[str, list[str]] = {}
    for entry in yaml.safe_load(file.read_text()):
        forward = entry["name"].partition("(")[0]
        formulas = [value for key, value in entry.items() if key not in ("name", "dispatch")]
        formulas += [
            text for texts in entry.get("dispatch", {}).values() for text in texts.values()
        ]
        for formula in filter(lambda value: isinstance(value, str), formulas):
            for name, arguments in _calls(formula):
                if name in names and "backward" not in forward:
                    found = [forward, *_meaning(entry["name"], name, arguments)]
                    is_own = forward == re.sub("_backward.*", "", name)
                    if len(found) + is_own > len(calls.get(name, ())):
                        calls[name] = found
    return dict(sorted(calls.items()))


def text_of_calls(calls: Mapping[str, list[str]]) -> str:
    lines = [
        "# Backward operator -> its forward, and what its arguments are in the forward's call: an argument, its sizes",
        "# or rows, or an output. Made by benchmarks/operator_registry.py from PyTorch's derivatives: do not edit.",
    ]
    for name, (forward, *meaning) in calls.items():
        pairs = ", ".join('{} = "{}"'.format(*pair.split(": ")) for pair in meaning)
        lines += ["", f"[{name}]", f'forward = "{forward}"', pairs.replace(", ", "\n")]
    return "\n".join(lines) + "\n"


def _calls(formula: str) -> Iterator[tuple[str, list[str]]]:
    """The calls of backward operators in a formula of C++, each with its arguments."""
    for match in re.finditer(r"\b(\w*_backward\w*?)(_symint)?\(", formula):
        depth, arguments, text = 1, [], ""
        for letter in formula[match.end() :]:
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(letter, 0)
            if depth == 0:
                break
            if letter == "," and depth == 1:
                arguments.append(text.strip())
                text = ""
            else:
                text += letter
        yield match[1], [*arguments, text.strip()]


def _meaning(forward: str, backward: str, arguments: list[str]) -> list[str]:
    """What the arguments of a backward are, as `mean: output 1`; those that are none are left out."""
    import torch

    taken = getattr(torch.ops.aten, backward).default._schema.arguments
    name, _, overload = forward.partition("(")[0].partition(".")
    schema = getattr(getattr(torch.ops.aten, name), overload or "default")._schema
    inputs = {argument.name for argument in schema.arguments}
    outputs = {value.name: number for number, value in enumerate(schema.returns) if value.name}
    outputs |= {f"result{number}": number for number in range(len(schema.returns))}
    outputs |= {"result": 0, "grad": 0, "grads[0]": 0}
    meaning = []
    for argument, text in zip(taken, arguments, strict=False):
        text = re.sub(r"/\*.*?\*/", "", text).replace("->", ".").strip()
        word, _, rest = text.partition(".")
        if word in inputs and rest.startswith("sym_sizes()"):
            meaning.append(f"{argument.name}: sizes {word}")
        elif word in inputs and rest == "sym_size(0)":
            meaning.append(f"{argument.name}: rows {word}")
        elif word in inputs and (not rest or "Tensor" in str(argument.type)):
            meaning.append(f"{argument.name}: {word}")
        elif word in outputs:
            meaning.append(f"{argument.name}: output {outputs[word]}")
    return meaning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("others", nargs="*", metavar="VERSION=FOLDER")
    parser.add_argument("--write", action="store_true", help="write the list")
    parser.add_argument("--print-registry", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.print_registry:
        print(json.dumps([asdict(one) for one in overloads_of_this_torch()]))
        return
    versions = {}
    for other in given.others:
        version, _, folder = other.partition("=")
        versions[version] = overloads_of(folder)
    versions[".".join(torch.__version__.split(".")[:2])] = overloads_of_this_torch()
    present = listed(LIST) if LIST.exists() else {}
    known = re.findall(r"2\.\d+", LIST.read_text().partition("Made")[0]) if present else []
    reasons = merged(versions, present)
    for reason, count in Counter(reasons.values()).most_common():
        print(f"{count:5} {reason or 'allowed'}")
    if given.write:
        CALLS.write_text(text_of_calls(backward_calls()))
        newest = overloads_of_this_torch()
        tagged = tagged_packets(newest)
        by_element = {one.name for one in newest if computes_by_element(one, tagged)}
        LIST.write_text(text_of(reasons, by_element, ", ".join(sorted({*known, *versions}))))


if __name__ == "__main__":
    main()
