"""Write the names and input sizes of timm's models, so that the catalog can list them without timm.

    python benchmarks/timm_names.py        # writes farm/models/timm.json

Models that do not take square images of three channels are omitted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from farm.models import timm as source
from farm.models.torchvision import torchvision_models

TABLE = Path(source.__file__).with_name("timm.json")


def by_size() -> dict[str, list[str]]:
    """Input size, with the suffix "only" if the model accepts no other -> names."""
    torchvision_models()  # timm imports torchvision, which may need a fix first
    import timm

    found: dict[tuple[int, bool], list[str]] = defaultdict(list)
    for name in timm.list_models():
        about = timm.get_pretrained_cfg(name, allow_unregistered=True)
        channels, height, width = about.input_size
        if channels == 3 and height == width:
            found[height, bool(about.fixed_input_size)].append(name)
    return {
        f"{size} only" if fixed else f"{size}": names
        for (size, fixed), names in sorted(found.items())
    }


def main() -> None:
    lines = [f'  "{size}": {json.dumps(" ".join(names))}' for size, names in by_size().items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
