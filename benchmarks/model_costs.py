"""Count parameters and FLOPs of every model of torchvision and transformers for the table of `farm
models`.

    python benchmarks/model_costs.py                    # writes farm/models/costs.json
    python benchmarks/model_costs.py transformers       # only this source

Batch 1 and each model's default size, as `farm operators MODEL -b 1` counts. Runs on the meta
device: no GPU and little memory. FLOPs of models that cannot be captured are omitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from farm.errors import CaptureError
from farm.models import catalog
from farm.training.extract import extract

TABLE = Path(catalog.__file__).with_name("costs.json")
SOURCES = ("torchvision", "transformers")


def costs(name: str) -> dict[str, int]:
    found = {"parameters": sum(parameter.numel() for parameter in catalog.build(name).parameters())}
    try:
        apart = extract(catalog.variant(name))
    except CaptureError:
        return found
    return found if apart.refusal(name) else {**found, "flops": apart.flops}


def main() -> None:
    table = json.loads(TABLE.read_text())
    for source in sys.argv[1:] or SOURCES:
        names = catalog.source_named(source).entries()
        table[source] = {name: costs(f"{source}/{name}") for name in names}
    parts = [
        f'  "{source}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(of)}' for name, of in entries.items())
        + "\n  }"
        for source, entries in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
