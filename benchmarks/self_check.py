"""Time the self-check of captures, and list what it finds: models whose tuples are not what they
run.

    python benchmarks/self_check.py                            # torchvision's 80 classification
    models python benchmarks/self_check.py resnet50 gpt2,length=64    # these; a comma precedes each
    field of the variant python benchmarks/self_check.py --device-type cuda swin_t,step=training

A capture without and with the check is timed in one run, by CPU time. Fields: those of
`farm.models.catalog.variant`. One process, no GPU needed."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from farm.models import catalog, torchvision
from farm.operators import self_check
from farm.operators.captured import CapturedPass
from farm.training.extract import Extraction, extract
from farm.types.variant import Variant


class Timed:
    """Replaces the check by one that adds up its own time."""

    def __init__(self) -> None:
        self.check_s = 0.0
        self.checked = self_check.checked
        self_check.checked = self.check  # type: ignore[assignment]

    def check(self, *args: Any, **kwargs: Any) -> CapturedPass:
        begun_s = time.process_time()
        found = self.checked(*args, **kwargs)
        self.check_s += time.process_time() - begun_s
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="NAME or NAME,FIELD=VALUE,...")
    parser.add_argument(
        "--source", default="torchvision", help="without models: the classifiers of this source"
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--device-type", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--quiet", action="store_true", help="no line for a model without a mismatch"
    )
    options = parser.parse_args()
    torchvision.torchvision_models()  # exclude imports from the times
    names = options.models or catalog.names("classification", source=options.source)
    timed = Timed()
    extract(catalog.variant("resnet18", 1))
    timed.check_s, total_s = 0.0, 0.0
    tuples = mismatches = failures = 0
    for name in names:
        begun_s = time.process_time()
        try:
            found = extract(variant_of(name, options.batch), device_type=options.device_type)
        except Exception as error:  # count every failure
            failures += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        total_s += time.process_time() - begun_s
        tuples += len(found.capture.tuples)
        mismatches += len(found.capture.mismatches)
        if found.capture.mismatches or not options.quiet:
            print(
                f"{name:40} {len(found.capture.tuples):5} tuples, {len(found.capture.mismatches)} "
                "mismatches"
            )
        show(found)
    before_s = total_s - timed.check_s
    print(f"{len(names)} models, {failures} not captured; {tuples} tuples, {mismatches} mismatches")
    if before_s:
        print(
            f"{before_s:.1f} s without the check, {total_s:.1f} s with it: ratio "
            f"{total_s / before_s:.2f}"
        )


def variant_of(text: str, batch: int) -> Variant:
    name, *fields = text.split(",")
    pairs = [field.split("=") for field in fields]
    given: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in pairs}
    return catalog.variant(name, given.pop("batch", batch), **given)


def show(found: Extraction) -> None:
    for tuple_id, text in found.capture.mismatches.items():
        print(f"    {found.capture.tuples[tuple_id].operator}: {text}")


if __name__ == "__main__":
    main()
