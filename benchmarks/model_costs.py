"""Counts parameters and FLOPs of every model of torchvision into the table that `farm models` shows.

    python benchmarks/model_costs.py        # writes farm/models/costs.json

At batch 1 and each model's default size, as `farm operators MODEL -b 1` counts. On meta: needs no GPU and little memory.
"""

from __future__ import annotations

import json
from pathlib import Path

from farm.models import catalog
from farm.operators.taking_apart import take_apart

TABLE = Path(catalog.__file__).with_name("costs.json")


def costs(name: str) -> dict[str, int]:
    apart = take_apart(catalog.variant(name))
    return {
        "parameters": sum(parameter.numel() for parameter in catalog.build(name).parameters()),
        "flops": apart.flops,
    }


def main() -> None:
    lines = [f'  "{name}": {json.dumps(costs(name))}' for name in catalog.names(source="torchvision")]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
