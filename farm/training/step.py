"""One training iteration in its stages, as people write it: zero_grad, forward, loss, backward, optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from farm.errors import UsageError
from farm.training.losses import Loss

#: So small that weights stay where they are over thousands of steps, in every dtype.
LEARNING_RATE = 1e-12

#: What a loss is multiplied by at first, under autocast to float16: no gradient of the first step is infinite. A fused SGD
#: whose first step is not taken begins with momentum that nobody has set.
SCALE = 2.0**10

#: Told by a stage's name as it begins, and left as it ends.
Around = Callable[[str], contextlib.AbstractContextManager[Any]]


class TrainingStep:
    """A model with what one iteration of its training needs.

    Attributes:
        loss: None until the first step has shown what the model gives.
    """

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
            optimizer: sgd, adam or adamw; with -fused or -foreach behind it that implementation, else PyTorch's choice.
            amp: what autocast computes in; float16 with a gradient scaler, and a fused optimizer, which need not ask the card
                whether a gradient is infinite.
            accumulate: passes over the inputs before the optimizer.
            capturable: the optimizer keeps its count of steps on the card, for a CUDA graph.
        """
        self.model, self.inputs, self.accumulate, self.amp = model, inputs, accumulate, amp
        self.optimizer = make_optimizer(optimizer, model, capturable=capturable)
        self.scaler = torch.amp.GradScaler(self._device.type, SCALE) if amp == torch.float16 else None
        self.loss: Loss | None = None
        self._make_loss = make_loss

    def run(self, around: Around = lambda stage: contextlib.nullcontext()) -> None:
        with around("zero_grad"):
            self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            with self._autocast():
                with around("forward"):
                    output = self.model(*self.inputs)
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
        """Have the next step be the second, whichever it is: what Adam multiplies by depends on it, and a tuple holds that.

        On a card the count is a tensor that is computed with, and nothing depends on it.
        """
        for state in self.optimizer.state.values():
            if isinstance(count := state.get("step"), torch.Tensor) and count.device.type == "cpu":
                count.fill_(1)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.amp)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def make_optimizer(name: str, model: nn.Module, *, capturable: bool = False) -> torch.optim.Optimizer:
    """
    Args:
        name: one of `farm.types.protocol.OPTIMIZERS`.

    Raises:
        UsageError: the model has nothing to train.
    """
    kind, _, implementation = name.partition("-")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("The model has no parameters to train.", "Give one that is trained.")
    chosen: dict[str, Any] = {implementation: True} if implementation else {}
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, **chosen)
    made = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return made(parameters, lr=LEARNING_RATE, capturable=capturable, **chosen)


@contextlib.contextmanager
def checkpointed(model: nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
    """`checkpoint_modules` while active."""
    modules = checkpoint_modules(model, paths)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def checkpoint_modules(model: nn.Module, paths: tuple[str, ...]) -> list[nn.Module]:
    """Have modules run anew in the backward instead of keeping what they computed; returns them.

    The state of random numbers is not kept for the second time: reading it no CUDA graph can hold, and what is dropped out
    costs the same whichever it is.

    Args:
        paths: of the modules; ("blocks",) stands for those of `blocks_of`.

    Raises:
        UsageError: there is no such module.
    """
    from torch.utils.checkpoint import checkpoint

    modules = [_module(model, path) for path in (blocks_of(model) if paths == ("blocks",) else paths)]
    for module in modules:
        module.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
        )
    return modules


def blocks_of(model: nn.Module) -> list[str]:
    """The paths of a model's blocks, in their order: of all stages, where it has several.

    Blocks are the modules of the class that fills the list of equal modules with the most parameters: a decoder's layers, say.

    Raises:
        UsageError: there is no such list.
    """

    def size(children: list[nn.Module]) -> int:
        return sum(parameter.numel() for child in children for parameter in child.parameters())

    lists = []
    for module in model.modules():
        children = list(module.children())
        kinds = {type(child) for child in children}
        if len(children) > 1 and len(kinds) == 1 and not kinds & {nn.Linear, nn.Conv2d}:
            lists.append(children)
    if not lists:
        raise UsageError("The model has no list of equal blocks.", "Name modules: --recompute layer1.0,layer1.1")
    kind = type(max(lists, key=size)[0])
    paths = [name for name, module in model.named_modules() if type(module) is kind]
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UsageError(
            f"The model has no module '{path}'.", "Paths are those of PyTorch's named_modules()."
        ) from None
