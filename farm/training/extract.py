"""Extracts the operator tuples of a model variant's forward pass or training step, without a card.

The model is built on meta and runs on fake tensors; only small integers are computed
(`farm.operators.fake_pass`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import CaptureError, UnseenOperators, UnsupportedTensor, UsageError, refused
from farm.models import catalog, own
from farm.models.resolved import ResolvedModel
from farm.models.user_code import captured_code
from farm.operators import self_check
from farm.operators.capture import capture, predict, refuse_opaque, settled
from farm.operators.captured import CapturedPass
from farm.operators.cost import Cost, costs_of, model_flops
from farm.operators.fake_outputs import as_computed
from farm.operators.fake_pass import STANDS_FOR_A_CARD, fake_pass
from farm.operators.output_sizes import sizes_in_words
from farm.subjects.encoding import tensors_in
from farm.subjects.needed import needed_tuple
from farm.training.capture import capture_step
from farm.training.card_functions import as_on_card, normalized_as_on_card
from farm.training.split import build, completing_works, fake_group, split
from farm.training.step import (
    AUTOCAST_DTYPES,
    ForwardPass,
    Loss,
    TrainingStep,
    checkpoint_modules,
    loss_of,
)
from farm.training.tensor_lifetime import least_peak_bytes
from farm.types.program_state import tensors_restored
from farm.types.tensor_kinds import bytes_of, is_plain
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant

MEASURABLE_ALONE = (
    "Write this part so that its result depends on its arguments only, not on PyTorch's settings."
)
MOST_LOCATIONS = 3  # places listed per reason
# largest mask that is computed if the model reads a value of it: 16 of 4096 x 4096
MOST_MASK_BYTES = 2**28
MOST_RUN_BYTES = 2 * 2**30  # parameters and buffers of a model that is run with values
STEP_COPIES = 4  # of the parameters in a training step: gradients and two states of an optimizer


@dataclass(frozen=True)
class Extraction:
    """The operators of a variant and their costs."""

    capture: CapturedPass
    costs: dict[str, Cost]  # of one call, by tuple id
    # of the whole model by PyTorch's counter, to check the sum over the tuples; of a model on
    # several cards, which it cannot count, that sum itself; None: not counted
    model_flops: int | None = None
    # a lower bound of a training step's peak memory; 0 for a forward pass
    least_peak_bytes: int = 0

    @property
    def flops(self) -> int:
        return sum(self.costs[call.tuple_id].flops for call in self.capture.calls)

    @property
    def bytes_moved(self) -> int:
        """The minimum of bytes that all calls read and write."""
        return sum(self.costs[call.tuple_id].bytes for call in self.capture.calls)

    @property
    def note_on_values(self) -> str:
        """Which calls depend on values, so that another input may have other calls; "" if none."""
        specs = self.capture.tuples.values()
        return sizes_in_words(specs, with_values=self.capture.with_values)

    def needed(self) -> list[NeededTuple]:
        """The tuples, all with the data class of the protocol."""
        counts, mismatches = self.capture.counts, self.capture.mismatches
        tuples = []
        for id_, spec in self.capture.tuples.items():
            needed = needed_tuple(spec, self.costs[id_], counts[id_])
            tuples.append(dataclasses.replace(needed, mismatch=mismatches.get(id_, "")))
        return tuples

    def refusal(self, name: str) -> CaptureError | None:
        """An error if the model ``name`` cannot be summed from its operators; else None."""
        gaps, overlaps = self.capture.gaps, self.capture.overlaps
        if gaps or overlaps:
            step = (
                "The sum would miss these calls. Write this part with public PyTorch functions "
                "and modules."
            )
            return CaptureError(
                f"{name} cannot be extracted completely: {_by_reason(gaps + overlaps)}.", step
            )
        mismatches = self.capture.mismatches
        if mismatches and mismatches.keys() >= self.capture.tuples.keys():
            reasons = "; ".join(dict.fromkeys(mismatches.values()))
            text = f"No operator of {name} can be measured alone as the model runs it: {reasons}."
            return CaptureError(text, MEASURABLE_ALONE)
        if not self.capture.calls:
            text = (
                f"{name} has no operators to measure: no call on its example input computes or "
                "copies data."
            )
            return CaptureError(text, "Give an example input that the model computes with.")
        return None


def _by_reason(texts: Iterable[str]) -> str:
    """Joins the messages of gaps and overlaps: each reason once, with its places."""
    locations: dict[str, dict[str, None]] = {}
    for text in texts:
        where, _, reason = text.partition(": ")
        _, _, call = where.partition(" at ")
        # The name of the call is clearer than the names of its aten operators.
        locations.setdefault(reason, {})[f"at {call}" if " in " in call else where] = None
    parts = []
    for reason, of_reason in locations.items():
        more = (
            f" and {len(of_reason) - MOST_LOCATIONS} more"
            if len(of_reason) > MOST_LOCATIONS
            else ""
        )
        parts.append(f"{reason} ({'; '.join(list(of_reason)[:MOST_LOCATIONS])}{more})")
    return "; ".join(parts)


#: At most one: the newest version of a user's model.
_kept: dict[tuple[Variant, str, bool], Extraction] = {}


def keep_extraction(variant: Variant, extraction: Extraction) -> None:
    """Let `extract` return this extraction for the version of a user's model, for a forward pass on
    a CPU.
    """
    _kept.clear()
    _kept[variant, "cpu", False] = extraction


def extract(
    variant: Variant,
    *,
    device_type: str = "cpu",
    grad: bool = False,
    model: ResolvedModel | None = None,
) -> Extraction:
    """Extracts the operator tuples that a variant runs on a kind of device; see
    `Extraction.refusal` for completeness. ``grad``: run the forward pass with grad enabled; a
    training step always does. Raises `CaptureError` if the model or the step does not run, and as
    `farm.models.catalog` and `farm.training.step`.

    If a forward pass depends on values other than small integers, the model runs on the CPU; its
    parameters and buffers may have at most `MOST_RUN_BYTES`. ``model``: the variant's model, if the
    caller has found it."""
    if variant.version and (kept := _kept.get((variant, device_type, grad))) is not None:
        return kept
    with refused(f"{variant.model} cannot be captured"):
        resolved = model or catalog.resolve(variant.model)
        if variant.step:
            return _step_extraction(variant, resolved, device_type)
        if variant.cards > 1:
            captured = _extract_split(variant, resolved, device_type, grad=grad)
            captured = _checked(captured, device_type)
            costs = costs_of(captured)
            # PyTorch's counter cannot count one rank's part.
            flops = sum(costs[call.tuple_id].flops for call in captured.calls)
            return Extraction(captured, costs, flops)
        with captured_code():
            captured, flops = _extract_forward(variant, resolved, device_type, grad=grad)
        return Extraction(captured, costs_of(captured), flops)


def _step_extraction(variant: Variant, resolved: ResolvedModel, device_type: str) -> Extraction:
    captured = extract_step(variant, device_type=device_type, model=resolved)
    step = _checked(captured, device_type)
    assert step.flops is not None, "extract_step counts the FLOPs of each step that it captures"
    if step.device_type == device_type:
        peak_bytes = max(step.memory_bytes)
    else:
        peak_bytes = least_peak_bytes(step)
    return Extraction(step, costs_of(step), step.flops, peak_bytes)


def _extract_forward(
    variant: Variant, resolved: ResolvedModel, device_type: str, *, grad: bool
) -> tuple[CapturedPass, int]:
    """The operators and the FLOPs of a forward pass, without values if possible."""
    model, inputs = resolved.build(variant, device="meta"), resolved.meta_inputs(variant)
    try:
        captured, flops = _predicted(model, inputs, device_type=device_type, grad_enabled=grad)
        return _checked(captured, device_type), flops
    except (UnseenOperators, UnsupportedTensor):
        raise
    except CaptureError as error:
        # models of torchvision read no values
        if resolved.entry.origin == "torchvision":
            raise
        _check_may_run(model, error)
    try:
        model = resolved.build(variant, device="cpu")
        inputs = resolved.example_inputs(variant, device="cpu")
        with tensors_restored(model):
            captured = settled(model, lambda: capture(model, inputs, grad_enabled=grad))
            flops = model_flops(model, inputs, computed=True)
        captured = dataclasses.replace(captured, with_values=True)
        return self_check.checked_on(torch.device("cpu"), captured), flops
    except (UnseenOperators, UnsupportedTensor):
        raise
    except CaptureError as error:
        raise CaptureError(
            error.message, f"{error.next_step}{resolved.hint_about_inputs(variant)}"
        ) from error


def _check_may_run(model: torch.nn.Module, error: CaptureError, *, copies: int = 1) -> None:
    """Raises ``error`` with the reason if a model is too large to run with values. ``copies``: of
    the parameters, such as their gradients."""
    needed = copies * bytes_of([*model.parameters(), *model.buffers()])
    if needed > MOST_RUN_BYTES:
        more = " with gradients and states" if copies > 1 else ""
        raise CaptureError(
            f"{error.message} A capture with real values is not possible: parameters and buffers"
            f"{more} take "
            f"{needed / 2**30:.1f} GiB, and the limit is {MOST_RUN_BYTES / 2**30:.0f} GiB.",
            f"{error.next_step} Or choose a smaller variant of the model, for example with "
            "--layers.",
        ) from error


def _predicted(
    model: torch.nn.Module, inputs: tuple[Any, ...], **about: Any
) -> tuple[CapturedPass, int]:
    """The operators and the FLOPs of a model. If it reads a value of a large mask, masks are
    computed.
    """
    try:
        captured = predict(model, inputs, **about)
        return captured, model_flops(model, inputs, passes_before=captured.passes_before)
    except (UnseenOperators, UnsupportedTensor):
        raise
    except CaptureError:
        captured = predict(model, inputs, made=MOST_MASK_BYTES, **about)
        before = captured.passes_before
        return captured, model_flops(model, inputs, made=MOST_MASK_BYTES, passes_before=before)


def _checked(captured: CapturedPass, device_type: str) -> CapturedPass:
    """The capture of a pass with its mismatches."""
    stands = captured.stands_for(device_type)
    if captured.with_values:
        corrected = functools.partial(as_computed, on_card=False)
        return self_check.checked_on(torch.device("cpu"), captured, corrected=corrected)
    return self_check.checked(
        captured, device_type, corrected=functools.partial(as_computed, on_card=stands)
    )


def _extract_split(
    variant: Variant, resolved: ResolvedModel, device_type: str, *, grad: bool
) -> CapturedPass:
    """Captures the aten operators and the collectives that one rank of a split model runs in a
    forward pass.
    """
    device = "cpu" if device_type == "cpu" else STANDS_FOR_A_CARD
    on_card = contextlib.nullcontext() if device_type == "cpu" else normalized_as_on_card()
    with captured_code(), fake_group(variant.cards), on_card:
        model, inputs = resolved.build(variant, device="meta"), resolved.meta_inputs(variant)
        with fake_pass(model, inputs, None, device) as (fakes, fake_inputs, _):
            split(model, variant, "cpu", resolved)
            return capture_forward(model, fake_inputs, grad=grad, warmed_up=False, fakes=fakes)


def capture_forward(
    model: torch.nn.Module, inputs: tuple[Any, ...], *, grad: bool, **about: Any
) -> CapturedPass:
    captured = capture_step(ForwardPass(model, inputs, grad=grad), **{"warmed_up": True} | about)
    calls = tuple(
        dataclasses.replace(call, part="", owner="", stage="", owner_index=None)
        for call in captured.calls
    )
    return dataclasses.replace(
        captured, calls=calls, owners=(), grad_enabled=grad, training=model.training
    )


def extract_step(
    variant: Variant, *, device_type: str = "cpu", model: ResolvedModel | None = None
) -> CapturedPass:
    """Captures one training step of a variant as a kind of device would run it, in train mode;
    nothing is computed. ``model``: the variant's model, if the caller has found it.

    Without a CUDA context it records the operators of the CPU, but the optimizer of a GPU and the
    functions of `farm.training.card_functions`. A step that depends on values runs for real on the
    CPU. Raises `CaptureError` if the step does not run, and as `farm.models.catalog` and
    `farm.training.step`."""
    if variant.phase == "decode":
        text = "A training step cannot use the phase decode (one token with a cache)."
        raise UsageError(text, "Give --phase prefill.")
    with refused(f"The training step of {variant.model} cannot be captured"):
        resolved = model or catalog.resolve(variant.model)
        try:
            return _extract_step_for(variant, resolved, device_type)
        except (UnseenOperators, UnsupportedTensor):
            raise
        except CaptureError as error:
            _refuse_special(variant, resolved)
            if variant.cards > 1 or error.__cause__ is None:
                raise
            return _step_with_values(variant, resolved, device_type, error)


def _step_with_values(
    variant: Variant, resolved: ResolvedModel, device_type: str, error: CaptureError
) -> CapturedPass:
    """A training step that ran on the CPU, with the optimizer of a kind of device."""
    _check_may_run(resolved.build(variant, device="meta"), error, copies=STEP_COPIES)
    device = torch.device("cpu")
    with captured_code():
        model = resolved.build(variant, device=device)
        inputs = resolved.example_inputs(variant, device=device)
        with tensors_restored(model), checkpoint_modules(model, variant.recompute):
            chosen = _chosen(variant, device_type)
            step = TrainingStep(
                model,
                inputs,
                make_loss=lambda output: loss_for(resolved, variant, output, device),
                **chosen,
            )
            return capture_step(step, with_values=True)


def _refuse_special(variant: Variant, resolved: ResolvedModel) -> None:
    """Raises `UnsupportedTensor` with the module's path if the forward pass computes with a special
    tensor. A step that has one ends with an error of PyTorch, or without the path."""
    model, inputs = resolved.build(variant, device="meta"), resolved.meta_inputs(variant)
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    if all(map(is_plain, tensors_in(tensors))):
        return
    try:
        predict(model, inputs, grad_enabled=True)
    except UnsupportedTensor:
        raise
    except CaptureError:
        return


def _extract_step_for(variant: Variant, resolved: ResolvedModel, device_type: str) -> CapturedPass:
    on = device_type if torch.cuda.is_initialized() else "cpu"
    if on == device_type:
        return _extract_step(variant, resolved, device_type, on, on)
    with as_on_card():
        # some models mix tensors of two devices, which a card allows
        with contextlib.suppress(Exception):
            return _extract_step(variant, resolved, device_type, on, STANDS_FOR_A_CARD)
        return _extract_step(variant, resolved, device_type, on, on)


def _extract_step(
    variant: Variant, resolved: ResolvedModel, device_type: str, on: str, there: str
) -> CapturedPass:
    """`extract_step` with the operators of one device (``on``); the fake tensors are on another
    (``there``).
    """
    with captured_code():
        model, inputs = resolved.build(variant, device="meta"), resolved.meta_inputs(variant)
        refuse_opaque(model)
        with (
            fake_group(variant.cards),
            fake_pass(model, inputs, None, there) as (fakes, fake_inputs, _),
            checkpoint_modules(model, variant.recompute),
            completing_works(variant.cards),
        ):
            forward = split(model, variant, on, resolved)

            def loss(output: Any) -> Loss:
                with _disable_current_modes():
                    real = loss_for(resolved, variant, output, torch.device("cpu"))
                    return dataclasses.replace(real, targets=fakes.tree(real.targets))

            step = TrainingStep(model, fake_inputs, make_loss=loss, **_chosen(variant, device_type))
            step.forward, step.split = forward, variant.cards > 1
            if step.split:
                # `capture_step` runs it again, and explains the error
                with contextlib.suppress(Exception):
                    step.run()  # DDP forms its buckets anew in the second run
            return capture_step(step, device_type=on, fakes=fakes)


@torch.enable_grad()
def build_step(variant: Variant, device: torch.device, *, launch: str = "eager") -> TrainingStep:
    """Builds a variant's training step on a device with seeded random weights and runs it once;
    raises as `extract_step`. For a CUDA graph, Adam and AdamW keep their step count on the card."""
    resolved = catalog.resolve(variant.model)
    model, inputs = build(variant, device, resolved)
    checkpoint_modules(model, variant.recompute)
    chosen = _chosen(variant, device.type, launch)
    step = TrainingStep(
        model,
        inputs,
        make_loss=lambda output: loss_for(resolved, variant, output, device),
        **chosen,
    )
    step.split = variant.cards > 1
    if variant.data_parallel > 1 and variant.sharding == "ddp":
        step.forward = split(model, variant, device.type, resolved)
    # The first run creates the optimizer's state and the loss. DDP needs eleven runs before a CUDA
    # graph records it.
    for _ in range(11 if step.forward is not model else 1):
        step.run()
    return step


def autocast_of(variant: Variant, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """The context of the forward pass of a variant's training step: autocast, or none."""
    dtype = AUTOCAST_DTYPES[variant.amp]
    return torch.autocast(device_type, dtype) if dtype else contextlib.nullcontext()


def _chosen(variant: Variant, device_type: str, launch: str = "eager") -> dict[str, Any]:
    return {
        "optimizer": implementation(variant.optimizer, device_type),
        "amp": AUTOCAST_DTYPES[variant.amp],
        "accumulate": variant.accumulate,
        "capturable": device_type == "cuda" and launch == "graph",
    }


def loss_for(model: ResolvedModel, variant: Variant, output: Any, device: torch.device) -> Loss:
    """The loss of a variant: the one that the user registered for the model, else one chosen by its
    output.
    """
    entry = model.entry
    if entry.origin == own.NAME and (registered := own.loss(entry.own_name)) is not None:
        return Loss(own.loss_target(entry.own_name), (), lambda output, _: registered(output))
    return loss_of(
        output,
        causal=entry.generates,
        masked=bool(variant.length) and not entry.generates,
        device=device,
    )


def implementation(optimizer: str, device_type: str) -> str:
    """The optimizer's name with its implementation: on a GPU foreach, unless the name has a
    suffix.
    """
    return optimizer if "-" in optimizer or device_type == "cpu" else f"{optimizer}-foreach"
