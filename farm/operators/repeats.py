"""What a leaf or a function did once on fake tensors, done again without running it.

They are rebuilt by their description alone, and a fake pass knows of tensors only what is in their layouts: a second
call that is given the same does the same. Three calls of four in a model are such repeats, and
running one on fake tensors costs up to a millisecond of Python. Only predicted passes repeat; on a device everything runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from farm.operators.encoding import Given
from farm.operators.fakes import Fakes

#: Shape, stride and dtype of a tensor with memory of its own.
NewTensor = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Effect:
    """What a call did: the aten operators that cost anything, what it wrote, and its one output.

    ``written`` are positions among the call's tensors, and so is ``output`` where one of them was returned; else it
    is a new tensor.
    """

    operators: tuple[str, ...]
    written: tuple[int, ...]
    output: int | NewTensor


def repeatable(module: nn.Module) -> bool:
    """Whether a leaf does nothing but what its class does."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class Repeats:
    def __init__(self, fakes: Fakes) -> None:
        self.fakes = fakes
        self.effects: dict[Hashable, Effect] = {}
        self.functions: set[str] = (
            set()
        )  # of which an effect is known; most others return views, and are not worth describing

    def again(self, given: Given) -> tuple[tuple[str, ...], set[int], torch.Tensor] | None:
        """What `learn` was told of an equal call, for the tensors of this one; None where it must run."""
        effect = None if _holds_values(given) else self.effects.get(_key(given))
        if effect is None:
            return None
        place = effect.output
        out = given.tensors[place] if isinstance(place, int) else self.fakes.fresh(*place)
        return effect.operators, {given.storages[position] for position in effect.written}, out

    def learn(self, given: Given, operators: list[str], written: set[int], out: object) -> bool:
        """Keeps what a call did and says so, unless it returned a view, a tensor to differentiate, or not one tensor alone.

        ``written`` are the addresses of the storages that it wrote.
        """
        if type(out) is not FakeTensor or out.requires_grad or out.is_conj() or out.is_neg() or _holds_values(given):
            return False
        output: int | NewTensor
        same = [index for index, tensor in enumerate(given.tensors) if tensor is out]
        if same:
            output = same[0]
        else:
            output = tuple(out.shape), tuple(out.stride()), out.dtype
            storage = out.untyped_storage()
            whole = storage.nbytes() == self.fakes.fresh(*output).untyped_storage().nbytes()
            if storage._cdata in given.storages or out.storage_offset() or not whole:
                return False
        positions = tuple(index for index, storage in enumerate(given.storages) if storage in written)
        self.effects[_key(given)] = Effect(tuple(operators), positions, output)
        return True


def _key(given: Given) -> Hashable:
    # Beside the tuple and its strides, what operators may yet go by.
    flags = [(tensor.requires_grad, tensor.is_conj(), tensor.is_neg()) for tensor in given.tensors]
    return given.key, torch.is_grad_enabled(), tuple(flags)


def _holds_values(given: Given) -> bool:
    """Whether a tensor is a real one, or what is made may be, since nothing is given but numbers (`farm.operators.known`)."""
    return not given.tensors or any(type(tensor) is not FakeTensor for tensor in given.tensors)
