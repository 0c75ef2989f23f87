"""The interface of a kind of operator tuples. A kind knows all that differs between kinds.

A kind is one class in one file, and `farm.subjects.registry.register` makes it known. The defaults
fit an operator of which nothing special is known: a run on meta shows what it writes and costs.
Only `target` has no default. A kind imports torch inside its methods: labels and validation work
without it. A complete kind:

    class Wait(Kind):
        name = "wait"

        def check(self, spec):
            if set(spec.parameters) != {"steps"}:
                raise reject("parameters", "are not those of a wait")

        def target(self, spec, tensors, device):
            return lambda tensor: [tensor + 1 for _ in range(spec.parameters["steps"])]

A method that raises says why in a `TupleRejected`: the call is then a row with that reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from farm.errors import TupleRejected
from farm.subjects.values import Fill, keeps_finite, public_values
from farm.types.tuple import Cost, OperatorTuple, TensorSpec

if TYPE_CHECKING:
    import torch


NEXT_STEP = "Capture the model again with this version. Do not edit a tuple by hand."


class Kind:
    """What differs between kinds of operator tuples: see the module's docstring."""

    name: ClassVar[str]  # the value of `OperatorTuple.kind`
    #: `target` is the function that a model calls, above autograd; False: it is called below
    #: autograd, such as an overload of an operator.
    public: ClassVar = False
    has_state: ClassVar = False  # has tensors of its own, with names
    #: A process needs no compiler and no other cards to run it. Otherwise inputs that it changes
    #: are restored before each run, and a capture cannot be checked without a card.
    standalone: ClassVar = True
    #: Its time depends on its parameters and sizes only, so predictors learn from its readings.
    is_predictable: ClassVar = True
    #: A call of which a run on meta does not show the memory that it needs is refused.
    must_run_on_meta: ClassVar = False
    #: Several cards of one host may run a call together: see `cards` and `bus_bytes`.
    on_several_cards: ClassVar = False

    # ----- capture and description

    def recorded_name(self, function: Any) -> str:
        """The operator that a capture records for a call of ``function``; "" if it is none."""
        return ""

    def check(self, spec: OperatorTuple) -> None:
        """Raise `reject` if a tuple with valid JSON trees and tensors is none of this kind."""

    def called_name(self, spec: OperatorTuple) -> str:
        """The name by which rules of cost know the operator, such as ``__setitem__``."""
        return spec.operator.rsplit(".", 1)[-1]

    def size_words(self, spec: OperatorTuple) -> list[str]:
        """Words of the label after the parameters that all kinds show."""
        return []

    def call_words(self, spec: OperatorTuple) -> list[str] | None:
        """Words of the label for the arguments of the call; None: those that are not tensors."""
        return None

    def shown_tensors(self, spec: OperatorTuple) -> Sequence[TensorSpec]:
        """The tensors whose shapes the label shows."""
        return spec.passed_tensors

    def cards(self, spec: OperatorTuple) -> int:
        """The number of cards of one host that run a call together."""
        return 1

    def bus_bytes(self, spec: OperatorTuple) -> float:
        """The bytes that a call moves between cards, as nccl-tests counts them for the bandwidth of
        the bus; 0 if a reading has no such bandwidth."""
        return 0.0

    # ----- building

    def admit(self, spec: OperatorTuple) -> None:
        """Raise `TupleRejected` if the operator must not be built here, before memory is used."""

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        """Return what is called with the arguments; ``tensors``: one for each of the tuple."""
        raise NotImplementedError

    def values(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
        """The values for tensor ``index`` of an operator that writes the tensors ``written``."""
        return public_values(spec, index, written)

    def may_be_zero(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> bool:
        """True if the result is finite if tensor ``index`` has zeros."""
        return keeps_finite(spec, index, written)

    def written(self, spec: OperatorTuple) -> frozenset[int] | None:
        """Indices of the tensors that a call writes; None: a run on meta shows them."""
        return None

    def outputs(self, spec: OperatorTuple) -> frozenset[int]:
        """Indices of the tensors that a call writes and does not read."""
        return frozenset()

    def host_storages(self, spec: OperatorTuple) -> frozenset[int]:
        """Numbers of the storages that an operator of a GPU reads in the memory of the host."""
        return frozenset()

    # ----- measurement

    def phases(self, spec: OperatorTuple) -> Mapping[str, Any]:
        """Phases that the measurement of a tuple has beside those of all tuples
        (`farm.benchmark.phases.base.Phase`). The key is the name of the phase before it: "window",
        "burst", "context", "restoring", "overlap", or another added phase."""
        return {}

    # ----- cost and checks

    def cost(self, spec: OperatorTuple) -> Cost | None:
        """The cost of one call; None: it is counted in a run on meta."""
        return None

    def run_on_meta(self, spec: OperatorTuple, built: Any) -> Any:
        """Run the `Rebuilt` operator to count its cost; return what it returns."""
        return built.run()

    def largest_outputs(self, spec: OperatorTuple) -> int | None:
        """The most bytes that the outputs of a call can take whose sizes depend on values; None if
        its shapes decide that, or `farm.operators.output_sizes` has a rule."""
        return None

    def unread_storages(self, spec: OperatorTuple) -> frozenset[int]:
        """Numbers of the storages whose content a call does not read."""
        outputs = self.outputs(spec)
        read = {tensor.storage for index, tensor in enumerate(spec.tensors) if index not in outputs}
        return frozenset(tensor.storage for tensor in spec.tensors) - read

    def with_roles(self, spec: OperatorTuple, trained: tuple[bool, ...]) -> OperatorTuple:
        """The same call with roles by ``trained``: whether each tensor requires gradients."""
        return spec


def reject(where: str, problem: str) -> TupleRejected:
    """The error for JSON that is no tuple: which key is wrong, and what is wrong with it."""
    return TupleRejected(f"Not an operator tuple: {where} {problem}.", NEXT_STEP)
