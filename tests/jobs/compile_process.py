"""Stands for a compile process, without torch: what it does depends on the batch of the variant.

    batch 1: compile at once    batch 2: work until the file `go` exists    batch 3: crash
    batch 4: refuse the model   batch 5: take more memory than allowed

The folder of these files is in the variable COMPILE_TEST. A process writes one byte into the file
`work` for each turn of its work."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from farm.devices.simulated import SOFTWARE

FOLDER = Path(os.environ["COMPILE_TEST"])
CARD = {"id": "SIM-1", "kind": "simulated", "model": "a card", "memory_bytes": 0, "host": "here"}


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def compile_variant(batch: int, most_bytes: int) -> None:
    if batch == 2:
        with (FOLDER / "work").open("ab", buffering=0) as file:
            while not (FOLDER / "go").exists():
                file.write(b".")
                time.sleep(0.005)
    if batch == 3:
        os.abort()
    if batch == 4:
        raise ValueError("no shape is known")
    if batch == 5:
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, resource.RLIM_INFINITY))
        bytearray(2 * most_bytes)


def main() -> None:
    say(event="ready", pid=os.getpid(), card=CARD, software=SOFTWARE.to_json())
    for line in sys.stdin:
        request = json.loads(line)
        batch, number = request["subject"]["spec"]["batch"], request["id"]
        with (FOLDER / "begun").open("a") as file:
            file.write(f"{batch} {os.getpid()}\n")
        try:
            compile_variant(batch, request["most_bytes"])
        except (ValueError, MemoryError) as error:
            reason = "raised" if isinstance(error, ValueError) else "out_of_memory"
            say(event="unmeasurable", id=number, reason=reason, message=f"{error}", next_step="")
        else:
            say(event="answer", id=number, answer={"took_s": 0.1, "has_context": False})


if __name__ == "__main__":
    main()
