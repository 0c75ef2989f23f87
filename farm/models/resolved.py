"""A model that was found in the catalog, and all that can be asked about it without another search.

`farm.models.catalog.resolve` finds it. Only modules, inputs and a user's own model need torch.
Nothing is downloaded: weights are random, seeded, and equal wherever the same torch builds them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UnsupportedModel, UsageError
from farm.models import own, transformers
from farm.models.entry import ModelEntry, Source, install_line, is_installed
from farm.models.texts import hold_tokens
from farm.types.protocol import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Other names of dtypes.
_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_MOST_SIZES = 2  # number of input sizes in a title


@dataclass(frozen=True)
class ResolvedModel:
    """A model, and the source that makes it. Example::

    model = catalog.resolve("resnet18")
    variant = model.variant(batch=32)
    model.build(variant)(*model.example_inputs(variant))
    """

    source: Source
    entry: ModelEntry

    @property
    def is_own(self) -> bool:
        """True for a user's model."""
        return self.entry.origin == own.NAME

    @property
    def _is_function(self) -> bool:
        """True for a user's model that a function makes, not a folder with a config.json."""
        return self.is_own and own.is_function(self.entry.own_name)

    def usual_batch(self, default: int) -> int:
        """The batch of a user's own example inputs; ``default`` for all other models. Imports torch
        for a user's model.
        """
        if self.is_own:
            with contextlib.suppress(SettingsError):  # using the model raises this error again
                return own.own_batch(self.entry.own_name) or default
        return default

    def variant(self, batch: int = 1, **fields: Any) -> Variant:
        """A variant of this model; see `farm.models.catalog.variant`."""
        values = self._own_dtype()
        values.update({name: value for name, value in fields.items() if value is not None})
        for name in ("dtype", "amp"):
            if name in values:
                values[name] = _DTYPES.get(values[name], values[name])
        text, tokenizer = values.pop("text", None), values.pop("tokenizer", None)
        _check_pair(text, tokenizer)
        for name in ("length", "cache", "layers"):
            if values.get(name) == 0:  # in a variant 0 means the default
                raise UsageError(
                    f"--{name} is 0; it must be at least 1.",
                    f"Omit --{name} to use the model's default.",
                )
        if "input_size" in values and self._own_inputs() is not None:
            problem = (
                f"{self.entry.own_name} defines its own example inputs, and --input-size cannot "
                "change them."
            )
            raise UsageError(problem, "Omit --input-size. The option -b changes the batch.")
        variant = Variant(model=self.entry.name, batch=batch, **self.entry.completed(values))
        if text is None or tokenizer is None:
            return variant
        if not variant.phase:
            raise UsageError(
                f"{self.entry.name} takes no tokens and no text.", "Omit --text and --tokenizer."
            )
        tokens = transformers.tokens_of(self.entry, variant, Path(text), Path(tokenizer))
        return dataclasses.replace(variant, text=hold_tokens(tokens))

    def _own_dtype(self) -> dict[str, Any]:
        """The dtype of a user's model as its function returned it; empty if it has no decimals, and
        for other models.
        """
        if self._is_function:
            with contextlib.suppress(SettingsError):  # using the model raises this error again
                dtype = own.built(self.entry.own_name).dtype
                return {"dtype": dtype} if dtype else {}
        return {}

    def differences(self, variant: Variant) -> list[str]:
        """Lines about what differs between a user's model and the measured one: its dtype, its mode
        or its class.
        """
        with contextlib.suppress(UsageError):  # using the model raises this error again
            if self._is_function:
                return own.differences(self.entry.own_name, variant)
            if self.is_own:
                return transformers.differences(self.entry.own_name)
        return []

    def hint_about_inputs(self, variant: Variant) -> str:
        """A next step for a model that raises on an input of the farm; "" for a user's own example
        inputs.
        """
        if self._is_function:
            if own.built(self.entry.own_name).dtype not in ("", variant.dtype):
                return " Or omit --dtype, to measure it in its own dtype."
            if self._own_inputs() is not None:
                return ""
            return (
                " The input is an image; return a pair of the model and its example inputs for "
                "another one."
            )
        if variant.length and not self.entry.fixed_length:
            return (
                f" The input is the farm's own, with a length of {variant.length}; --length gives "
                "another one."
            )
        return ""

    def build(
        self,
        variant: Variant,
        *,
        device: str | torch.device = "meta",
        seed: int = 0,
        real_buffers: bool = False,
    ) -> nn.Module:
        """Build the module of a variant.

        On meta the module has shapes and no memory; ``real_buffers`` keeps the values of tensors
        that are not made by ``torch.empty`` (caches, masks). On other devices it has random
        weights, equal for equal seeds. Raises `UnsupportedModel` if the package of its source is
        not installed."""
        import torch

        from farm.models.building import EmptyOnMeta, memory_format_of
        from farm.models.tensor_kinds import placed

        self._check_installed()
        device = torch.device(device)
        on_meta = device.type == "meta"
        with contextlib.ExitStack() as stack:
            if on_meta:
                stack.enter_context(EmptyOnMeta())
            else:
                stack.enter_context(
                    torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
                )
                torch.manual_seed(seed)
            module = self.source.make(self.entry, variant, device)
        if not (real_buffers and on_meta):
            module = placed(module, device)
        if variant.memory_format != Variant.memory_format and self.entry.task != "video":
            memory_format = memory_format_of(variant)
            module = module.to(memory_format=memory_format)  # type: ignore[call-overload]
        if self.source is own and variant.mode == "train" and module.training:
            return module  # modules that the user has frozen stay in eval mode
        return module.train(variant.mode == "train")

    def _check_installed(self) -> None:
        """Raise `UnsupportedModel` if the source's package is not installed."""
        if not is_installed(self.source):
            problem = (
                f"{self.entry.name} is a model of {self.source.PACKAGE}, which is not installed."
            )
            raise UnsupportedModel(problem, f"Install it: {install_line(self.source)}")

    def example_inputs(
        self, variant: Variant, *, device: str | torch.device = "meta"
    ) -> tuple[Any, ...]:
        """Positional arguments of the module that `build` returns. Raises `UsageError` for a size
        that does not fit.

        For an image model, these are standard normal images of shape (batch, 3, size, size) or
        clips of shape (batch, 3, 16, size, size). If a user's model has its own inputs, the input
        size is ignored."""
        import torch

        self._check_installed()
        self.entry.completed(variant.to_json())
        return self.source.inputs(self.entry, variant, torch.device(device))

    def meta_inputs(self, variant: Variant) -> tuple[Any, ...]:
        """As `example_inputs` on meta, but integer tensors (token ids, masks) have values: a model
        may read them.
        """
        import torch

        empty = self.example_inputs(variant)
        integer = [
            isinstance(value, torch.Tensor) and not value.is_floating_point() for value in empty
        ]
        real = self.example_inputs(variant, device="cpu") if any(integer) else empty
        return tuple(
            value if is_integer else meta
            for is_integer, value, meta in zip(integer, real, empty, strict=True)
        )

    def tensor_parallel_plan(self, variant: Variant, model: nn.Module) -> Mapping[str, str]:
        """Path of each module of a built model that tensor parallelism splits -> how. Raises
        `UnsupportedModel` if the model has no plan, or its heads cannot be divided among the
        cards."""
        if self.source is not transformers:
            raise UnsupportedModel(
                f"{variant.model} has no plan for tensor parallelism.",
                "Choose a language model of transformers. A model of your own that is distributed "
                "needs only --cards.",
            )
        return transformers.tensor_parallel_plan(self.entry, model, variant.tensor_parallel)

    def title_of(self, variant: Variant) -> str:
        """The title of a variant. For a user's model with its own inputs it shows the input sizes:
        'bert 8x128 float32'.

        Imports torch for a user's model only.
        """
        inputs = self._own_inputs()
        if inputs is None:
            return str(variant)
        return titled_by(variant, own.batched(inputs, variant.batch))

    def _own_inputs(self) -> tuple[Any, ...] | None:
        """The example inputs of a user's model; None if it has none."""
        return own.given_inputs(self.entry.own_name) if self.is_own else None

    def forget_edited(self, step: str) -> None:
        """If a file of a user's model changed since it was loaded, import it at the next use."""
        own.forget_edited(self.entry.own_name, step)

    def code(self, step: str) -> list[str]:
        """The source code of a user's model, see `farm.models.own.code`."""
        return own.code(self.entry.own_name, step)


def _check_pair(text: Any, tokenizer: Any) -> None:
    """Raise `UsageError` if only one of the two files of a user's text is given."""
    step = "Give both options, or neither to use the farm's own text."
    if text is not None and tokenizer is None:
        raise UsageError("--text needs --tokenizer.", step)
    if text is None and tokenizer is not None:
        raise UsageError("--tokenizer needs --text.", step)


def titled_by(variant: Variant, inputs: Sequence[Any]) -> str:
    shapes = map(shape_of, inputs)
    sizes = ["x".join(map(str, shape)) for shape in shapes if shape]
    shown = list(dict.fromkeys(sizes))
    more = ["…"] if len(shown) > _MOST_SIZES else []
    return variant.titled("+".join(shown[:_MOST_SIZES] + more) or str(variant.batch))


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an input; () if it is no tensor, or a nested one, which has no single shape."""
    if getattr(value, "is_nested", False):
        return ()
    tensor = value.data if hasattr(value, "batch_sizes") else value  # a packed sequence
    return tuple(getattr(tensor, "shape", ()))
