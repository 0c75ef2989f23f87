"""The benchmark process of the study `peer`: its slow memory is the memory of the second GPU that
it sees.
"""

from __future__ import annotations

from farm.benchmark_process.server import TorchRunner, main
from farm.devices.device import Device


class PeerRunner(TorchRunner):
    """Measures with tensors in another GPU's memory."""

    def __init__(self, device: Device) -> None:
        super().__init__(
            device
        )  # first: it finds this process's id on the card and chooses the stream
        from benchmarks.studies.peer_memory import take_from_peer  # imports torch

        take_from_peer(self._torch_device)


if __name__ == "__main__":
    main(PeerRunner)
