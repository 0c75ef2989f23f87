"""Quantised variants of a model: the schemes of ``--quantize``, as torchao makes them.

torchao replaces the weight of each `torch.nn.Linear` by a tensor class that consists of packed
numbers and scales. The model then runs torchao's own operators on these parts, and a capture
records them (`farm.types.tensor_kinds`)."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from farm.errors import FarmError, UnsupportedModel, UsageError, told
from farm.models.card_questions import without_context
from farm.types.card_kind import ASSUMED_CAPABILITY
from farm.types.variant import QUANTIZE_SCHEMES, Variant

if TYPE_CHECKING:
    from torch import nn

PACKAGE = "torchao"
INSTALL = "pip install 'operator-farm[quantization]'"
_GROUP = 128  # weights that share a scale in int4-weights, torchao's default


@dataclass(frozen=True)
class Scheme:
    """A scheme of quantisation.

    Attributes:
        make: makes torchao's configuration, given the module `torchao.quantization`.
        dtypes: of the model, that the scheme accepts.
        multiple: both sizes of a layer must be multiples of this number; others stay as they are.
        on_cpu: True if torchao has kernels for CPUs.
        eager_on_card: False if an eager pass cannot be measured on a card. torchao's `safe_int_mm`
            then prints its input, so the host waits for values in each layer.
    """

    make: Callable[[Any], Any]
    dtypes: tuple[str, ...]
    multiple: int = 1
    on_cpu: bool = False
    eager_on_card: bool = True

    def configuration(self, torchao: Any) -> Any:
        """torchao's configuration, given the module `torchao.quantization`.

        torchao changes settings of the compiler for the whole process unless it is told not to: all
        models that are compiled later would search over kernel configurations on the card
        (coordinate descent). How a model is compiled is the choice of the variant."""
        return replace(self.make(torchao), set_inductor_config=False)


SCHEMES: dict[str, Scheme] = {
    "int8-weights": Scheme(
        lambda torchao: torchao.Int8WeightOnlyConfig(),
        ("float32", "float16", "bfloat16"),
        on_cpu=True,
    ),
    "int8": Scheme(
        lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig(),
        ("float32", "float16", "bfloat16"),
        on_cpu=True,
        eager_on_card=False,
    ),
    "int4-weights": Scheme(
        lambda torchao: torchao.Int4WeightOnlyConfig(
            group_size=_GROUP, int4_packing_format="tile_packed_to_4d"
        ),
        ("bfloat16",),
        multiple=_GROUP,
    ),
    "fp8": Scheme(
        lambda torchao: torchao.Float8DynamicActivationFloat8WeightConfig(
            granularity=torchao.PerRow()
        ),
        ("bfloat16",),
        multiple=16,
    ),
}
assert SCHEMES.keys() == set(QUANTIZE_SCHEMES), "each scheme of a variant has an entry"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def check(variant: Variant, card_kind: str = "") -> None:
    """Raise `UsageError` if a variant cannot be quantised as it says: torchao is missing, or the
    scheme accepts neither its dtype nor this kind of card. Needs no torch.

    Args:
        card_kind: of the cards that measure it: ``cuda``, ``cpu`` or ``simulated``; "" if unknown.
    """
    if not variant.quantize:
        return
    if not is_installed():
        raise UsageError(
            f"--quantize needs {PACKAGE}, which is not installed.", f"Install it: {INSTALL}"
        )
    scheme = SCHEMES[variant.quantize]
    if variant.dtype not in scheme.dtypes:
        raise UsageError(
            f"--quantize {variant.quantize} works with {' or '.join(scheme.dtypes)}, not with "
            f"{variant.dtype}.",
            f"Give --dtype {scheme.dtypes[-1]}, or {_others(variant.dtype, card_kind)}.",
        )
    if card_kind == "cpu" and not scheme.on_cpu:
        raise UsageError(
            f"--quantize {variant.quantize} needs a GPU: {PACKAGE} has no kernels of it for CPUs.",
            f"Give {_others(variant.dtype, card_kind)}.",
        )
    if card_kind == "cuda" and not scheme.eager_on_card and not variant.generates_kernels:
        raise UsageError(
            f"--quantize {variant.quantize} cannot be measured eagerly on a GPU: {PACKAGE} reads "
            "the input of each layer on the host.",
            "Add --compile: the compiled model does not read it.",
        )


def _others(dtype: str, card_kind: str) -> str:
    """The schemes that work, as options."""
    names = [
        name
        for name, scheme in SCHEMES.items()
        if dtype in scheme.dtypes and (scheme.on_cpu or card_kind != "cpu")
    ]
    return " or ".join(f"--quantize {name}" for name in names) or "no --quantize"


def quantized(model: nn.Module, variant: Variant) -> nn.Module:
    """Quantise the linear layers of a built model in place, on the device of its weights; on meta
    as for a card. Return it.

    Raises `UsageError` if torchao is missing, and `UnsupportedModel` if the model has no linear
    layer that the scheme accepts, has quantised weights already, or if torchao refuses the card.
    """
    import torch

    from farm.types.tensor_kinds import has_composites

    check(variant)
    scheme, name = SCHEMES[variant.quantize], variant.quantize
    if has_composites(model):
        raise UnsupportedModel(
            f"{variant.model} has quantised weights already.", "Omit --quantize."
        )
    accepted = _accepted_layers(scheme, model)
    if not accepted:
        raise UnsupportedModel(
            f"{variant.model} has no linear layer that can be quantised as {name}"
            f"{_why_none(scheme, linear_layers(model))}.",
            "Omit --quantize, or give another scheme.",
        )
    is_accepted = set(map(id, accepted))
    is_planned = accepted[0].weight.device.type == "meta"
    try:
        with _as_on_card() if is_planned else contextlib.nullcontext():
            configuration = scheme.configuration(_torchao())
            _torchao().quantize_(
                model, configuration, filter_fn=lambda layer, _: id(layer) in is_accepted
            )
    except (FarmError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torchao raises assertions and errors of several kinds
        raise UnsupportedModel(
            f"{PACKAGE} cannot quantise {variant.model} as {name}: {told(error)}",
            f"Update {PACKAGE} ({INSTALL}), or give another scheme.",
        ) from error
    return model


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that torchao quantises. The output of `torch.nn.MultiheadAttention` is none: the
    attention reads its weight itself."""
    from torch import nn

    read_by_others = nn.modules.linear.NonDynamicallyQuantizableLinear
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and not isinstance(layer, read_by_others)
    ]


def _accepted_layers(scheme: Scheme, model: nn.Module) -> list[nn.Linear]:
    """The linear layers with sizes that a scheme accepts."""
    return [
        layer
        for layer in linear_layers(model)
        if not (layer.in_features % scheme.multiple or layer.out_features % scheme.multiple)
    ]


def _why_none(scheme: Scheme, layers: list[Any]) -> str:
    if not layers:
        return ": it has no torch.nn.Linear"
    sizes = f"{layers[0].in_features} x {layers[0].out_features}"
    return f": their sizes, such as {sizes}, are not multiples of {scheme.multiple}"


def layers_in_words(variant: Variant, model: nn.Module) -> str:
    """How much of a model a scheme quantises: "int8-weights: 16 of 17 linear layers with 93 % of
    the parameters"; ``model`` is not quantised yet."""
    scheme = SCHEMES[variant.quantize]
    layers, accepted = linear_layers(model), _accepted_layers(scheme, model)
    total = sum(parameter.numel() for parameter in model.parameters())
    numbers = sum(layer.weight.numel() for layer in accepted)
    line = (
        f"{variant.quantize}: {len(accepted)} of {len(layers)} linear layers are quantised, with "
        f"{numbers / max(1, total) * 100:.0f} % of the parameters"
    )
    if len(accepted) == len(layers):
        return f"{line}."
    return f"{line}; the sizes of the others are not multiples of {scheme.multiple}."


@functools.cache
def _torchao() -> Any:
    """The module `torchao.quantization`."""
    try:
        import_quietly()
        from torchao import quantization
    except ImportError as error:
        raise UsageError(
            f"{PACKAGE} cannot be imported: {told(error)}", f"Install it again: {INSTALL}"
        ) from error
    return quantization


@functools.cache
def import_quietly() -> None:
    """Import torchao, and the part of it that transformers imports, without its messages about
    compiled libraries that it does not find: it then uses those of PyTorch. Raises `ImportError` if
    it is not installed."""
    loggers = [logging.getLogger(name) for name in (PACKAGE, "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with without_context():
            import torchao.quantization

        with without_context(), contextlib.suppress(ImportError):
            import torchao.prototype.safetensors.safetensors_support  # noqa: F401
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _as_on_card() -> Iterator[None]:
    """While active, torchao finds a card. A model on meta needs none: its weights have no values,
    but torchao asks for the card that will run it."""
    import torch

    from farm.types.replacement import replaced

    with contextlib.ExitStack() as stack:
        for name, answer in (
            ("is_available", True),
            ("get_device_capability", ASSUMED_CAPABILITY),
        ):
            function = functools.partial(_answer, answer)
            stack.enter_context(replaced(torch.cuda, name, function))
        if torch.version.cuda is None:
            stack.enter_context(replaced(torch.version, "cuda", "12.8"))
        yield


def _answer(answer: Any, *_: Any, **__: Any) -> Any:
    return answer
