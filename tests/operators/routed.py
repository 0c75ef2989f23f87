"""A mixture of experts without transformers: a router, and one product for the rows of all
experts.
"""

from __future__ import annotations

import torch
from torch import nn


class Routed(nn.Module):
    """Each row goes to the best ``chosen`` of its ``experts``. With ``skew`` the first experts get
    most rows.
    """

    def __init__(
        self, width: int = 16, experts: int = 8, chosen: int = 2, skew: float = 0.0
    ) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.weights = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.experts, self.chosen = experts, chosen
        with torch.no_grad():
            self.router.bias.copy_(-skew * torch.arange(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.router(x).topk(self.chosen).indices.reshape(-1)
        experts, order = torch.sort(best)
        counts = torch.histc(experts.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = torch._grouped_mm(
            x[order // self.chosen].bfloat16(), self.weights.bfloat16(), offs=ends
        )
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return rows[back].view(len(x), self.chosen, -1).sum(1)


def routed(rows: int = 256, **about: float) -> tuple[Routed, torch.Tensor]:
    """The same model and input at each call."""
    torch.manual_seed(0)
    return Routed(**about).eval(), torch.randn(rows, int(about.get("width", 16)))  # type: ignore[arg-type]
