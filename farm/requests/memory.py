"""Checks that a variant fits in a card's memory before a job starts."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.errors import UsageError, refused
from farm.models import catalog
from farm.models.resolved import ResolvedModel
from farm.requests.partial_request import title_of
from farm.types.tuple import DTYPES
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.requests.card_selection import CardLike

# The largest input per sample in the catalog: 16 video frames with 3 colour planes.
_MOST_PLANES = 3 * 16
_MOST_OF_A_TOKEN = 16  # values per token: ids, masks and decoder inputs


@dataclass(frozen=True)
class VariantMemory:
    """The least memory that a variant needs on each card. Unit: bytes."""

    parameters: int  # parameters and buffers
    inputs: int  # inputs of the whole batch
    each_input: int  # inputs of one sample
    cache: int = 0  # cached keys and values of the whole batch; not included above


def check_fits(variant: Variant, card: CardLike, model: ResolvedModel | None = None) -> None:
    """Raise `UsageError` if inputs and parameters surely need more memory than the card has.
    ``model``: the variant's model, if the caller has found it."""
    if not card.memory_bytes:
        return
    model = model or catalog.resolve(variant.model)
    if _surely_fits(variant, model, card.memory_bytes):
        return
    memory = memory_of(variant, model)
    if memory.parameters + memory.inputs + memory.cache <= card.memory_bytes:
        return
    most = (card.memory_bytes - memory.parameters) // (
        memory.each_input + memory.cache // variant.batch or 1
    )
    takes = (
        f"its cache takes {_gb(memory.cache)}"
        if memory.cache
        else f"its inputs take {_gb(memory.inputs)}"
    )
    smaller = "a smaller batch or a shorter cache" if memory.cache else "a smaller batch"
    step = (
        "Choose a card with more memory, "
        f"{'or fewer --layers' if variant.phase else 'or a smaller model'}."
    )
    if most >= 1:
        step = (
            f"Give {smaller}. {'Cache' if memory.cache else 'Inputs'} and parameters fit up to "
            f"batch {most}, but the "
            "operators need additional memory."
        )
    raise UsageError(
        f"{model.title_of(variant)} does not fit into the {_gb(card.memory_bytes)} of "
        f"{card.model}: {takes} and its parameters take "
        f"{_gb(memory.parameters)}.",
        step,
    )


def check_step_fits(variant: Variant, card: CardLike, least_bytes: int) -> None:
    """Raise `UsageError` if the card has less memory than the step's peak needs at least, computed
    before it runs.
    """
    if 0 < card.memory_bytes < least_bytes:
        raise UsageError(
            f"{title_of(variant)} does not fit into the {_gb(card.memory_bytes)} of "
            f"{card.model}: the step holds at least "
            f"{_gb(least_bytes)} at once.",
            f"Give a smaller batch (`farm memory {variant.model} --fit "
            f"{card.memory_bytes // 10**9}GB` finds the "
            "largest), --recompute blocks, or --amp bfloat16.",
        )


def _surely_fits(variant: Variant, model: ResolvedModel, memory_bytes: int) -> bool:
    """True if the variant fits by the catalog's parameter count (buffers are far smaller). Does not
    build the model.
    """
    parameters = model.entry.parameters
    # A user's or timm's model has no count; the size of a cache is unknown before it is built.
    if parameters is None or variant.cache:
        return False
    values = 2 * parameters + variant.batch * (
        _MOST_PLANES * variant.input_size**2 + _MOST_OF_A_TOKEN * variant.length
    )
    return values * DTYPES[variant.dtype][0] <= memory_bytes


def memory_of(variant: Variant, model: ResolvedModel | None = None) -> VariantMemory:
    """Compute the memory of a variant's parameters and inputs, with the model on the meta device.
    Imports torch. Raises `UsageError` if the model cannot be built."""
    model = model or catalog.resolve(variant.model)
    with refused(f"{variant.model} cannot be built"):
        module = model.build(dataclasses.replace(variant, batch=1))
        # Batches 1 and 2, because a user's own model creates real inputs, and a large batch may not
        # fit in memory.
        one_bytes, two_bytes = (
            _bytes_of(model.example_inputs(dataclasses.replace(variant, batch=batch)))
            for batch in (1, 2)
        )
    cache_bytes = 0
    if variant.cache:
        buffers = dict(module.named_buffers())
        cache_bytes = sum(buffers[name].nbytes for name in buffers if "cached_" in name)
    held_bytes = _bytes_of([*module.parameters(), *module.buffers()]) - cache_bytes
    is_in_parts = variant.data_parallel == 1 or variant.sharding == "fsdp"
    each_bytes = two_bytes - one_bytes
    return VariantMemory(
        parameters=held_bytes // (variant.cards if is_in_parts else 1),
        inputs=one_bytes + (variant.batch - 1) * each_bytes,
        each_input=each_bytes,
        cache=variant.batch * cache_bytes,
    )


#: Remembered, so that a curve over batch sizes builds the model once.
_memory_of_one = functools.lru_cache(maxsize=16)(memory_of)


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that one pass needs, and the memory of a card. Library workspaces are not
    included. Unit: bytes.
    """

    card_bytes: int
    # None: certainly less than the card has, and nothing below is computed. Of a training step: a
    # lower bound of its peak, and the values below are None.
    needed_bytes: int | None = None
    weights_bytes: int | None = None  # parameters and buffers
    cache_bytes: int | None = None  # the cached keys and values of a prefill or decode
    activations_bytes: int | None = None  # the inputs, and the tensors of the largest call

    @property
    def cards(self) -> int:
        """The number of these cards that have enough memory together."""
        return max(1, -(-(self.needed_bytes or 0) // self.card_bytes))

    @property
    def fits(self) -> bool:
        return self.cards == 1

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "fits": self.fits, "cards_by_memory": self.cards}


def memory_need(
    variant: Variant, card_bytes: int, all_calls_bytes: int, largest_call_bytes: int
) -> MemoryNeed:
    """Compute the memory that one pass needs on a card of `card_bytes` (not 0). `all_calls_bytes`:
    sum of the tensors of all calls, an upper bound, because calls share tensors. Raises `FarmError`
    if the model cannot be built or extracted."""
    parameters = (catalog.find(variant.model).parameters or 0) * DTYPES[variant.dtype][0]
    if parameters + all_calls_bytes <= card_bytes:
        return MemoryNeed(card_bytes)
    if variant.step:
        from farm.training.extract import extract

        return MemoryNeed(card_bytes, extract(variant).least_peak_bytes)
    return pass_memory(variant, card_bytes, largest_call_bytes)


def pass_memory(variant: Variant, card_bytes: int, largest_call_bytes: int) -> MemoryNeed:
    """Compute the memory that one forward pass needs, whether it fits or not. Builds the model on
    the meta device. Raises as `memory_need`, and `UsageError` for a training step."""
    if variant.step:
        raise UsageError(
            "This is the memory of a forward pass, not of a training step.",
            "See `farm memory`, or `farm.fits` in Python.",
        )
    memory = _memory_of_one(dataclasses.replace(variant, batch=1))
    cache_bytes = 0
    # a prefill fills a cache with the length of the prompt
    if variant.phase in (
        "prefill",
        "decode",
    ):
        filled = dataclasses.replace(
            variant,
            batch=1,
            phase="decode",
            cache=variant.cache or variant.length,
            length=1,
            padded=False,
            text="",
        )
        cache_bytes = variant.batch * _memory_of_one(filled).cache
    activations_bytes = memory.inputs + (variant.batch - 1) * memory.each_input + largest_call_bytes
    parts = memory.parameters, cache_bytes, activations_bytes
    return MemoryNeed(card_bytes, sum(parts), *parts)


def _bytes_of(values: Any) -> int:
    import torch
    from torch.utils import _pytree

    from farm.types.tensor_kinds import bytes_of

    return bytes_of(
        value for value in _pytree.tree_leaves(values) if isinstance(value, torch.Tensor)
    )


def _gb(number: int) -> str:
    return f"{number / 1e9:,.1f} GB"
