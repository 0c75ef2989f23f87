"""One training iteration in its stages (zero_grad, forward, loss, backward, optimizer), and the
loss of a model.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from farm.errors import UnsupportedModel, UsageError
from farm.subjects.encoding import fields_of, tensors_in
from farm.types.variant import OPTIMIZERS

#: `Variant.amp` -> the dtype of autocast; None: no autocast.
AUTOCAST_DTYPES: dict[str, torch.dtype | None] = {
    "": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
#: So small that weights of every dtype stay unchanged over thousands of steps.
LEARNING_RATE = 1e-12

#: The initial loss scale under autocast to float16. It is small enough that no gradient of the
#: first step is infinite: fused SGD would have uninitialized momentum if its first step were
#: skipped.
SCALE = 2.0**10

IGNORED = -100  # PyTorch's value for a position without a target

#: Given a stage's name, returns the context to enter while the stage runs.
AroundStage = Callable[[str], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Loss:
    """A loss: ``of(output, targets)`` returns a scalar; ``targets`` are tensors that exist before
    the step.
    """

    name: str
    targets: tuple[torch.Tensor, ...]
    of: Callable[[Any, tuple[torch.Tensor, ...]], torch.Tensor]


class TrainingStep:
    """A model with its inputs, optimizer and loss: everything that one training iteration needs."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        *,
        optimizer: str,
        make_loss: Callable[[Any], Loss],
        amp: torch.dtype | None = None,
        accumulate: int = 1,
        capturable: bool = False,
    ) -> None:
        """
        Args:
            optimizer: sgd, adam or adamw. The suffix -fused or -foreach selects the implementation;
                without it PyTorch does. -compiled is foreach until `farm.operators.compiled`
                compiles it.
            amp: the dtype of autocast. float16 uses a gradient scaler and needs a fused optimizer,
                which checks for infinite gradients on the card, without waiting.
            accumulate: forward and backward passes per optimizer step.
            capturable: the optimizer keeps its step count on the card, for a CUDA graph.

        Raises:
            UsageError: the optimizer is unknown, or the model has no parameters to train.
        """
        self.model, self.inputs, self.accumulate, self.amp = model, inputs, accumulate, amp
        # runs the forward pass: the model, or the compiled model
        self.forward: Callable[..., Any] = model
        self.split = False  # True if the model is split over several cards
        # a compiled step compiles the optimizer, too
        self.compiles_optimizer = optimizer.endswith("-compiled")
        self.optimizer = _optimizer(optimizer, model, capturable)
        self._device_type = next(model.parameters()).device.type
        self.scaler: torch.amp.GradScaler | None = None
        if amp == torch.float16:
            self.scaler = torch.amp.GradScaler(self._device_type, SCALE)
        # created from the model's output in the first step; None before
        self.loss: Loss | None = None
        self._make_loss = make_loss

    @torch.enable_grad()
    def run(self, around: AroundStage = lambda stage: contextlib.nullcontext()) -> None:
        with around("zero_grad"):
            self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            with (
                torch.autocast(self._device_type, self.amp)
                if self.amp
                else contextlib.nullcontext()
            ):
                with around("forward"):
                    output = self.forward(*self.inputs)
                if self.loss is None:
                    self.loss = self._make_loss(output)
                with around("loss"):
                    loss = self.loss.of(output, self.loss.targets)
                    if self.accumulate > 1:
                        loss = loss / self.accumulate
                    if self.scaler is not None:
                        loss = self.scaler.scale(loss)
            del output
            with around("backward"):
                loss.backward()
            del loss
        with around("optimizer"):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def count_from_one(self) -> None:
        """Resets the step count, so that the next step is the second one: Adam's factors depend on
        the count, and tuples contain the factors.

        A count on the card is not reset: it is a tensor operand, and no tuple depends on its value.
        """
        for state in self.optimizer.state.values():
            if isinstance(count := state.get("step"), torch.Tensor) and count.device.type == "cpu":
                count.fill_(1)


class ForwardPass:
    """A forward pass, with the interface that the capture of a step uses."""

    loss, scaler, optimizer, split = None, None, SimpleNamespace(state={}), True

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        *,
        grad: bool,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.inputs, self.grad = model, inputs, grad
        self.kwargs = kwargs or {}

    def run(self, around: AroundStage = lambda stage: contextlib.nullcontext()) -> None:
        with torch.set_grad_enabled(self.grad), around("forward"):
            self.model(*self.inputs, **self.kwargs)

    def count_from_one(self) -> None:
        """Nothing: there is no optimizer."""


def _optimizer(name: str, model: nn.Module, capturable: bool) -> torch.optim.Optimizer:
    if name not in OPTIMIZERS:
        raise UsageError(
            f"There is no optimizer '{name}'.", f"Give one of {', '.join(OPTIMIZERS)}."
        )
    algorithm, _, implementation = name.partition("-")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError(
            "The model has no parameters to train.",
            "Choose a model with parameters, or omit --step.",
        )
    options: dict[str, Any] = {"lr": LEARNING_RATE}
    if implementation:
        options[implementation.replace("compiled", "foreach")] = True
    if algorithm == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    adam = torch.optim.Adam if algorithm == "adam" else torch.optim.AdamW
    return adam(parameters, capturable=capturable, **options)


def checkpoint_modules(model: nn.Module, recompute: str) -> contextlib.ExitStack:
    """Recomputes modules in the backward instead of storing their activations, until the returned
    stack is closed.

    ``recompute`` has the paths of the modules, separated by commas; "blocks" means the result of
    `blocks_of`, "" none. The state of the random generator is not restored for the second run: a
    CUDA graph cannot record that, and dropout costs the same whichever values it drops. Raises
    `UsageError` if there is no such module."""
    from torch.utils.checkpoint import checkpoint

    if recompute == "blocks":
        paths = blocks_of(model)
    else:
        paths = [path for path in recompute.split(",") if path]
    children = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        if path not in children:
            step = "Give a path that PyTorch's named_modules() lists."
            raise UsageError(f"--recompute: the model has no module '{path}'.", step)
    undo = contextlib.ExitStack()
    for module in dict.fromkeys(map(children.__getitem__, paths)):  # each once
        if "forward" in vars(module):
            undo.callback(setattr, module, "forward", module.forward)
        else:
            undo.callback(delattr, module, "forward")
        module.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
        )
    return undo


def blocks_of(model: nn.Module) -> list[str]:
    """The paths of a model's blocks in order, over all its stages; raises `UsageError` if there are
    none.

    Among lists of modules of one class, choose the list with the most parameters, such as a
    decoder's layers. Blocks are all modules of its class."""
    lists: list[tuple[int, type[nn.Module]]] = []
    for module in model.modules():
        children = list(module.children())
        kinds = {type(child) for child in children}
        if len(children) > 1 and len(kinds) == 1 and not kinds & {nn.Linear, nn.Conv2d}:
            size = sum(map(_parameters_in, children))
            lists.append((size, kinds.pop()))
    if not lists:
        text = "--recompute blocks: the model has no list of equal blocks."
        raise UsageError(text, "Name the modules: --recompute layer1.0,layer1.1")
    _, kind = max(lists, key=operator.itemgetter(0))
    paths = [name for name, module in model.named_modules() if type(module) is kind]
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _parameters_in(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def loss_of(output: Any, *, causal: bool, masked: bool, device: torch.device) -> Loss:
    """The loss for a model's output: ``causal`` if the logits of each position predict the next
    token, ``masked`` if those at some positions predict the token at the same position. Raises
    `UnsupportedModel` if no tensor of the output requires a gradient."""
    if not _trained(output):
        raise UnsupportedModel(
            "The model's output has no tensor that requires a gradient, so no loss can be "
            "computed.",
            "Register a loss function for the model: "
            'FARM_LOSSES=\'{"my_net": "my_package.models:my_loss"}\'.',
        )
    own_losses = _own_losses(output)
    if own_losses:
        return Loss(own_losses, (), _sum_of_own_losses)
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.dim() == 3 and (causal or masked):
        return _of_tokens(logits, causal, device)
    heads = [output] if isinstance(output, torch.Tensor) else [logits, *_heads(output)]
    heads = [head for head in heads if head is not None]
    are_classes = all(isinstance(head, torch.Tensor) and head.dim() == 2 for head in heads)
    if heads and are_classes and all(head.shape == heads[0].shape for head in heads):
        rows, classes = heads[0].shape
        return _of_classes(rows, classes, device)

    def mean_of_squares(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        means = [tensor.float().square().mean() for tensor in _trained(output)]
        return functools.reduce(operator.add, means)

    return Loss("mean of squares of its outputs", (), mean_of_squares)


def _own_losses(output: Any) -> str:
    """The name of the loss of a model that returns its losses; "" if it does not."""
    entries = fields_of(output)
    if isinstance(entries, dict) and _is_scalar(entries.get("loss")):
        return "loss of the model"
    trained = _trained(output)
    return "sum of the losses of the model" if all(map(_is_scalar, trained)) else ""


def _sum_of_own_losses(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
    entries = fields_of(output)
    if isinstance(entries, dict) and _is_scalar(entries.get("loss")):
        loss: torch.Tensor = entries["loss"]
        return loss
    return functools.reduce(operator.add, _trained(output))


def _is_scalar(value: Any) -> bool:
    """True for a tensor without dimensions that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.dim()


def _of_tokens(logits: torch.Tensor, causal: bool, device: torch.device) -> Loss:
    rows, length, classes = logits.shape
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(classes, (rows, length), generator=generator)
    if not causal:
        # as in BERT's training
        labels[torch.rand(rows, length, generator=generator) >= 0.15] = IGNORED

    def cross_entropy(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        predicted = output.logits[:, :-1] if causal else output.logits
        expected = targets[0][:, 1:] if causal else targets[0]
        return functional.cross_entropy(
            predicted.reshape(-1, classes), expected.reshape(-1), ignore_index=IGNORED
        )

    name = "cross-entropy of the next token" if causal else "cross-entropy of masked tokens"
    return Loss(name, (labels.to(device),), cross_entropy)


def _of_classes(rows: int, classes: int, device: torch.device) -> Loss:
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(2)).to(device)

    def cross_entropy(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = functional.cross_entropy(getattr(output, "logits", output), targets[0])
        for head in _heads(output)[1:]:
            # weighted as for GoogLeNet; Inception's reference training has 0.4
            if head is not None:
                loss = loss + 0.3 * functional.cross_entropy(head, targets[0])
        return loss

    return Loss("cross-entropy", (labels,), cross_entropy)


def _heads(output: Any) -> tuple[Any, ...]:
    """The heads of a model with auxiliary classifiers, such as torchvision's GoogLeNet: of a named
    tuple ``logits``, ``aux_logits``, ...; () for every other output.
    """
    names: tuple[str, ...] = getattr(output, "_fields", ())
    auxiliary = [name for name in names if name.startswith("aux_logits")]
    return tuple(output) if auxiliary and names == ("logits", *auxiliary) else ()


def _trained(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output that require gradients."""
    tensors = tensors_in(fields_of(output))
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]
