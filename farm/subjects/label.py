"""The label of an operator tuple, one readable line: 'Conv2d 64->128 k3 s2 | 32x64x56x56 fp32'.

Labels are shown and stored, never parsed. Tuples of one model should have different labels. So a
label has the properties that often differ: arguments that are not tensors, and which tensors are
parameters or buffers. If a label is too long, it is cut and ends with the beginning of the id."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from farm.subjects.registry import kind_of
from farm.types.distribution import LENGTH_STEP, PARTS, Distribution
from farm.types.format import MARK
from farm.types.tuple import (
    DTYPES,
    OperatorTuple,
    TensorSpec,
    holds_tensor,
    names_listed,
    plain,
    table_named,
)

LENGTH = 80
_LEAST = 6  # characters: if less of a text is left after a cut, it is left out
_LISTED = 4  # largest number of inputs in a label
# Names of aten operators that contain an underscore, without the leading one.
_LONG_NAMES = names_listed("with_underscores")
_SIZES, _LETTERS = table_named("sizes_in_labels"), table_named("letters_in_labels")
_FUSED = re.compile(rf"(?<![^_])_?(?:{'|'.join(sorted(_LONG_NAMES, reverse=True))}|[^_]+)(?![^_])")


def label_of(spec: OperatorTuple) -> str:
    """Return the label of a tuple: 'Conv2d 64->128 k3 s2 | 32x64x56x56 fp32'."""
    head = " ".join([spec.short_name, *_parameter_words(spec)])
    called = " ".join(_words_of_call(spec))
    zeros = max((tensor.zeros for tensor in spec.tensors), default=0.0)
    words = [
        _inputs(spec),
        _dtype(spec),
        *_layout_words(spec),
        f"zeros {zeros * 100:g} %" if zeros else "",
    ]
    words += [values_in_words(tensor.values) for tensor in spec.tensors if tensor.values]
    tail = " ".join(filter(None, [*words, "train" if spec.training else ""]))
    tail = f" | {tail}" if tail else ""
    if not called:
        return f"{head}{tail}"
    if len(whole := f"{head} {called}{tail}") <= LENGTH:
        return whole
    mark = f"#{spec.id[:MARK]}"
    room = LENGTH - len(f"{head} … {mark}{tail}")
    return f"{head} {called[:room]}… {mark}{tail}" if room >= _LEAST else f"{head} {mark}{tail}"


def call_of(spec: OperatorTuple) -> str:
    """Return the operator and its arguments without tensors: 'Conv2d 64->128 k3 s2'."""
    text = " ".join([spec.short_name, *_parameter_words(spec), *_words_of_call(spec)])
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"


def fused_names(text: str) -> list[str]:
    """Split the names of aten operators that a generated kernel computes, which underscores
    join.
    """
    return _FUSED.findall(text)


def _inputs(spec: OperatorTuple) -> str:
    words = []
    for word, alike in itertools.groupby(map(_tensor, kind_of(spec).shown_tensors(spec))):
        number = len(list(alike))
        words += [f"{number} of {word}"] if number > 2 else [word] * number
    if len(words) > _LISTED:
        words[_LISTED:] = [f"{len(words) - _LISTED} more"]
    return " + ".join(words)


def _tensor(tensor: TensorSpec) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return shape if tensor.role == "activation" else f"{shape} ({tensor.role})"


def _dtype(spec: OperatorTuple) -> str:
    shorts = [DTYPES[tensor.dtype][1] for tensor in spec.tensors]
    floating = (name for name in shorts if name[0] in "fbc" and name != "bool")
    return next(floating, shorts[0] if shorts else "")


def values_in_words(values: Distribution) -> str:
    """Describe values that decide the work of a call: '6 of 8 groups in 14 x 64'."""
    if values.form == "marks":
        return f"{values.numbers[0]} marked"
    if values.form == "places":
        order = ("random", "runs", "ascending")[values.numbers[1]]
        return f"{values.numbers[0]}/{PARTS} distinct {order}"
    if values.form == "distinct":
        return f"{values.numbers[0]} distinct"
    if values.form == "repeats":
        return f"{values.numbers[0]} rows of {values.numbers[1]}"
    if values.form == "below":
        return f"{values.numbers[0]} classes"
    step = LENGTH_STEP if values.form == "lengths" else values.step
    size = f" in {values.tiles} x {step}" if step > 1 else ""
    return f"{values.used_segments} of {values.segments} groups{size}"


def _layout_words(spec: OperatorTuple) -> Iterator[str]:
    strided = [tensor for tensor in spec.activations if tensor.stride is not None]
    images = [tensor for tensor in strided if len(tensor.shape) == 4]
    if images:
        _, c, h, w = images[0].shape
        yield "cl" if images[0].stride == (c * h * w, 1, w * c, c) else "strided"
    elif strided:
        yield "strided"
    if offset := next((tensor.offset for tensor in spec.activations if tensor.offset), 0):
        yield f"offset {offset}"
    yield from dict.fromkeys(itertools.chain.from_iterable(tensor.bits for tensor in spec.tensors))


def _words_of_call(spec: OperatorTuple) -> Iterable[str]:
    words = kind_of(spec).call_words(spec)
    return _argument_words(spec) if words is None else words


def _argument_words(spec: OperatorTuple) -> Iterator[str]:
    """Yield the arguments that are not tensors. Arguments that are None or False are left out."""
    arguments = list(spec.arguments)
    if spec.short_name in ("getitem", "setitem") and len(arguments) > 1:
        key, *value = arguments[1:]
        if key != {"tensor": _only(key)}:
            parts = key["tuple"] if isinstance(key, dict) and "tuple" in key else [key]
            yield f"[{', '.join(map(_text, parts))}]"
        arguments = [] if not value or _only(value[0]) is not None else ["=", *value]
    for tree in arguments:
        if tree is not None and not holds_tensor(tree):
            yield _text(tree)
    for name, tree in spec.keywords.items():
        if tree is not None and tree is not False and not holds_tensor(tree):
            yield name if tree is True else f"{name} {_text(tree)}"


def _only(tree: Any) -> Any:
    """Return the index of the tensor if the JSON tree is just a tensor; else None."""
    return tree.get("tensor") if isinstance(tree, dict) else None


def _text(tree: Any) -> str:
    if isinstance(tree, float):
        return str(tree) if len(str(tree)) <= 8 else f"{tree:.6g}"
    if isinstance(tree, list):
        return ",".join(map(_text, tree)) or "()"
    if isinstance(tree, dict) and len(tree) == 1:
        ((tag, value),) = tree.items()
        if tag == "tensor":
            return "_"
        if tag == "dtype":
            return DTYPES[value][1]
        if tag == "tuple":
            return _text(value)
        if tag == "slice":
            parts = value if value[2] is not None else value[:2]
            return ":".join("" if part is None else _text(part) for part in parts)
        return str(plain(tree))
    return "".join(letter if letter.isprintable() else "?" for letter in str(tree))


def _parameter_words(spec: OperatorTuple) -> list[str]:
    """Return the sizes of a module, and those of its parameters that differ from their defaults."""
    values = {name: plain(value) for name, value in spec.parameters.items()}
    words: list[str] = []

    def size(value: Any) -> str:
        if isinstance(value, list):
            return str(value[0]) if len(set(map(str, value))) == 1 else "x".join(map(str, value))
        return str(value)

    for source, target in _SIZES.items():
        if source in values and target in values:
            words.append(f"{values[source]}->{values[target]}")
    if "embed_dim" in values:
        words.append(f"{values['embed_dim']}/{values.get('num_heads')}")
    for name, (letter, usual) in _LETTERS.items():
        value = values.get(name)
        if value is None or size(value) == usual:
            continue
        # Models have adaptive pools to 1 and to (1, 1); these are two tuples.
        every = name == "output_size" and isinstance(value, list)
        words.append(f"{letter}{'x'.join(map(str, value)) if every else size(value)}")
    words += kind_of(spec).size_words(spec)
    if spec.short_name.endswith("Dropout"):
        words.append(f"p{values.get('p')}")
    if values.get("inplace"):
        words.append("inplace")
    return words
