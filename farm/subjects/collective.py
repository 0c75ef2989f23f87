"""Collectives of the cards of one host, such as ``collective.all_reduce``: see
`farm.types.collective` for their parameters, `farm.subjects.collective_calls` for their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farm.subjects.base import Kind, reject
from farm.types.collective import bus_bytes, output_elements, problem_of
from farm.types.tuple import Cost, OperatorTuple

if TYPE_CHECKING:
    import torch


class Collective(Kind):
    """A collective on one tensor of each rank."""

    name = "collective"
    standalone = False
    on_several_cards = True

    def check(self, spec: OperatorTuple) -> None:
        shapes = [
            tensor.shape for tensor in spec.tensors if tensor.stride is None and tensor.offset == 0
        ]
        problem = problem_of(spec.operator, spec.parameters, shapes)
        if problem:
            raise reject("operator", problem)
        if spec.arguments != ({"tensor": 0},) or spec.keywords:
            raise reject("arguments", "must be one tensor")

    def size_words(self, spec: OperatorTuple) -> list[str]:
        words = [f"{spec.parameters['cards']} cards"]
        if "reduction" in spec.parameters:
            words.insert(0, spec.parameters["reduction"])
        if "beside" in spec.parameters:
            words.append(f"beside a product of {spec.parameters['beside']}")
        return words

    def cards(self, spec: OperatorTuple) -> int:
        cards: int = spec.parameters["cards"]
        return cards

    def bus_bytes(self, spec: OperatorTuple) -> float:
        """0 beside a product: the time is not that of the collective alone."""
        if "beside" in spec.parameters:
            return 0.0
        (tensor,) = spec.tensors
        return bus_bytes(spec.operator, self.cards(spec), tensor.numel * tensor.itemsize_bytes)

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        from farm.subjects.collective_calls import call_of

        return call_of(spec, device)

    def written(self, spec: OperatorTuple) -> frozenset[int]:
        """The tensor if each call changes its values; otherwise it keeps them."""
        reduces_in_place = spec.short_name == "all_reduce"
        changes = reduces_in_place and spec.parameters["reduction"] in ("sum", "product")
        return frozenset({0} if changes else ())

    def cost(self, spec: OperatorTuple) -> Cost:
        """Input, output and the three matrices of a product beside the collective."""
        (tensor,), elements = spec.tensors, output_elements(spec)
        side = spec.parameters.get("beside", 0)
        size_bytes = (tensor.numel + elements + 3 * side**2) * tensor.itemsize_bytes
        return Cost(2 * side**3, size_bytes, ((elements,),))
