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
from farm.models import quantization, weights
from farm.models.entry import ModelEntry
from farm.models.own import batched
from farm.models.source import Source, install_line, is_installed
from farm.settings import user_models
from farm.types.variant import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Other names of dtypes.
_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_MOST_SIZES = 2  # number of input sizes in a title


@dataclass(frozen=True)
class ResolvedModel:
    """A model, and the source that has it. Example::

    model = catalog.resolve("resnet18")
    variant = model.variant(batch=32)
    model.build(variant)(*model.example_inputs(variant))
    """

    source: Source
    entry: ModelEntry

    @property
    def maker(self) -> Source:
        """The source that builds the model."""
        return self.source.maker(self.entry)

    # ---- variants

    def usual_batch(self, default: int) -> int:
        """The batch of a user's own example inputs; ``default`` for all other models. Imports torch
        for a user's model.
        """
        with contextlib.suppress(SettingsError):  # using the model raises this error again
            return self.maker.usual_batch(self.entry) or default
        return default

    def variant(self, batch: int = 1, **fields: Any) -> Variant:
        """A variant of this model; see `farm.models.catalog.variant`."""
        values = self._usual_dtype()
        values |= {name: value for name, value in fields.items() if value is not None}
        for name in ("dtype", "amp"):
            if values.get(name) in _DTYPES:
                values[name] = _DTYPES[values[name]]
        if "weights" in values:
            values["weights"] = self._registered_weights(values["weights"])
        text = values.pop("text", None)
        tokenizer = values.pop("tokenizer", None)
        _check_text(text, tokenizer)
        self._check_sizes(values)
        variant = Variant(model=self.entry.name, batch=batch, **self.entry.completed(values))
        quantization.check(variant)
        if text is None or tokenizer is None:
            return variant
        tokens = self.maker.tokens_of(self.entry, variant, Path(text), Path(tokenizer))
        user_models.add_text(tokens.id, tokens)
        return dataclasses.replace(variant, text=tokens.id)

    def _registered_weights(self, text: str) -> str:
        """See `farm.models.weights.registered`. Raises `UsageError` for a model that no function of
        the user makes."""
        if text != Variant.weights and not (self.has_versions and self.maker is self.source):
            raise UsageError(
                f"--weights works with your own models; {self.entry.name} has random weights.",
                "Omit --weights, or write a function that builds the model: my_models.py:net.",
            )
        return weights.registered(self.entry.own_name, text)

    def _usual_dtype(self) -> dict[str, Any]:
        """The dtype in which a model arrives, as a field of a variant; empty if it has none."""
        with contextlib.suppress(SettingsError):  # using the model raises this error again
            dtype = self.maker.usual_dtype(self.entry)
            return {"dtype": dtype} if dtype else {}
        return {}

    def _check_sizes(self, values: Mapping[str, Any]) -> None:
        """Raise `UsageError` for a size of 0, and for an input size if the model has its own
        inputs.
        """
        for name in ("length", "cache", "layers"):
            if values.get(name) == 0:  # in a variant 0 means the default
                raise UsageError(
                    f"--{name} is 0; it must be at least 1.",
                    f"Omit --{name} to use the model's default.",
                )
        if "input_size" in values and self.maker.example_inputs(self.entry) is not None:
            problem = (
                f"{self.entry.own_name} defines its own example inputs, and --input-size cannot "
                "change them."
            )
            raise UsageError(problem, "Omit --input-size. The option -b changes the batch.")

    def differences(self, variant: Variant) -> list[str]:
        """Lines about what differs between a user's model and the measured one: its dtype, its mode
        or its class; and how much of a model is quantised.
        """
        lines: list[str] = []
        with contextlib.suppress(UsageError):  # using the model raises this error again
            lines += self.maker.differences(self.entry, variant)
        if variant.quantize:
            with contextlib.suppress(UsageError):
                plain = self.build(dataclasses.replace(variant, quantize="", batch=1))
                lines.append(quantization.layers_in_words(variant, plain))
        return lines

    def hint_about_inputs(self, variant: Variant) -> str:
        """A next step for a model that raises on an input of the farm; "" for a user's own example
        inputs.
        """
        return self.maker.hint_about_inputs(self.entry, variant)

    def title_of(self, variant: Variant) -> str:
        """The title of a variant. For a user's model with its own inputs it shows the input sizes:
        'bert 8x128 float32'.

        Imports torch for a user's model only.
        """
        inputs = self.maker.example_inputs(self.entry)
        if inputs is None:
            return str(variant)
        shapes = [_without_memory(value) for value in inputs]
        return titled_by(variant, batched(shapes, variant.batch))

    # ---- modules and inputs

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

        from farm.models.building import built_on_meta, memory_format_of
        from farm.types.tensor_kinds import placed

        maker = self._installed_maker()
        self._registered_weights(variant.weights)
        device = torch.device(device)
        on_meta = device.type == "meta"

        def make() -> nn.Module:
            cards = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices=cards):
                torch.manual_seed(seed)
                return maker.make(self.entry, variant, device)

        module = built_on_meta(make) if on_meta else make()
        if not (real_buffers and on_meta):
            module = placed(module, device)
        if variant.memory_format != Variant.memory_format and self.entry.task != "video":
            memory_format = memory_format_of(variant)
            module = module.to(memory_format=memory_format)  # type: ignore[call-overload]
        trains = variant.mode == "train"
        if not (maker.keeps_modes and trains and module.training):
            # an exported module has the mode of its export
            with contextlib.suppress(NotImplementedError):
                module.train(trains)
        return quantization.quantized(module, variant) if variant.quantize else module

    def _installed_maker(self) -> Source:
        """The source that makes the model. Raises `UnsupportedModel` if its package is not
        installed.
        """
        maker = self.maker
        if not is_installed(maker):
            problem = f"{self.entry.name} is a model of {maker.package}, which is not installed."
            raise UnsupportedModel(problem, f"Install it: {install_line(maker)}")
        return maker

    def example_inputs(
        self, variant: Variant, *, device: str | torch.device = "meta"
    ) -> tuple[Any, ...]:
        """Positional arguments of the module that `build` returns. Raises `UsageError` for a size
        that does not fit.

        For an image model, these are standard normal images of shape (batch, 3, size, size) or
        clips of shape (batch, 3, 16, size, size). If a user's model has its own inputs, the input
        size is ignored."""
        import torch

        maker = self._installed_maker()
        self.entry.completed(variant.to_json())
        return maker.inputs(self.entry, variant, torch.device(device))

    def meta_inputs(self, variant: Variant) -> tuple[Any, ...]:
        """As `example_inputs` on meta, but integer tensors (token ids, masks) have values: a model
        may read them.
        """
        import torch

        inputs = list(self.example_inputs(variant))
        integers = [
            position
            for position, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and not value.is_floating_point()
        ]
        if integers:
            real = self.example_inputs(variant, device="cpu")
            for position in integers:
                inputs[position] = real[position]
        return tuple(inputs)

    def tensor_parallel_plan(self, variant: Variant, module: nn.Module) -> Mapping[str, str]:
        """Path of each module of a built model that tensor parallelism splits -> how. Raises
        `UnsupportedModel` if the model has no plan, or its heads cannot be divided among the
        cards."""
        return self.maker.tensor_parallel_plan(self.entry, module, variant.tensor_parallel)

    # ---- the version of a model

    @property
    def has_versions(self) -> bool:
        """True if source code on this host decides what the model computes."""
        return self.source.has_versions

    def code(self, step: str) -> list[str]:
        """See `Source.code`."""
        return self.source.code(self.entry, step)

    def forget_edited(self, step: str) -> None:
        """See `Source.forget_edited`."""
        self.source.forget_edited(self.entry, step)


def _check_text(text: Any, tokenizer: Any) -> None:
    """Raise `UsageError` if one of the two is given without the other."""
    if (text is None) == (tokenizer is None):
        return
    present, absent = ("--text", "--tokenizer") if tokenizer is None else ("--tokenizer", "--text")
    raise UsageError(
        f"{present} needs {absent}.", "Give both options, or neither to use the farm's own text."
    )


def _without_memory(value: Any) -> Any:
    """A tensor of the same shape on meta, so that a large batch of it takes no memory."""
    import torch

    from farm.types.tensor_kinds import is_plain

    return value.to("meta") if isinstance(value, torch.Tensor) and is_plain(value) else value


def titled_by(variant: Variant, inputs: Sequence[Any]) -> str:
    shapes = map(shape_of, inputs)
    sizes = list(dict.fromkeys("x".join(map(str, shape)) for shape in shapes if shape))
    if len(sizes) > _MOST_SIZES:
        sizes = [*sizes[:_MOST_SIZES], "…"]
    return variant.titled("+".join(sizes) or str(variant.batch))


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an input; () if it is no tensor, or a nested one, which has no single shape."""
    if getattr(value, "is_nested", False):
        return ()
    tensor = value.data if hasattr(value, "batch_sizes") else value  # a packed sequence
    return tuple(getattr(tensor, "shape", ()))
