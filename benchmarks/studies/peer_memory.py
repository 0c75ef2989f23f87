"""The memory of another GPU as slow memory, for the study `peer`."""

from __future__ import annotations

import torch

from farm.addons.memory import memory_tier
from farm.errors import Unmeasurable
from farm.types.format import count_of

APART_BYTES = 512  # alignment of the caching allocator


class PeerMemory(memory_tier.SlowMemory):
    """Memory of the second GPU that this process sees, mapped into the first."""

    name = "memory of another GPU"

    def __init__(self, device: torch.device) -> None:
        """Raises `Unmeasurable` (not_available) if there is no second GPU, or the first cannot
        access its memory.
        """
        if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
            raise Unmeasurable(
                "not_available",
                "This card cannot access the memory of another GPU: there is no peer access "
                "between them.",
                "List the cards with peer access with `nvidia-smi topo -p2p r`, and choose one "
                "with --card.",
            )
        self._device, self._peer = torch.device("cuda", 0), torch.device("cuda", 1)
        self._held: list[torch.Tensor] = []
        # This copy makes PyTorch enable peer access for the first GPU's kernels, for the whole
        # process. Memory that its allocator gets later is accessible, too.
        torch.zeros(1, device=self._peer).copy_(torch.zeros(1, device=self._device))

    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        try:
            there = torch.empty(size_bytes + APART_BYTES, dtype=torch.uint8, device=self._peer)
        except torch.OutOfMemoryError as error:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._peer)
            text = (
                f"{count_of(size_bytes, 'B')} cannot be allocated on the other GPU: "
                f"{count_of(free_bytes, 'B')} of its "
                f"{count_of(all_bytes, 'B')} are free."
            )
            raise Unmeasurable("out_of_memory", text, "Choose a smaller batch.") from error
        self._held.append(there)
        # The address must differ from the block's address, by which the caching allocator finds the
        # block to free.
        return memory_tier.storage_at(there.data_ptr() + APART_BYTES, size_bytes, self._device)


def take_from_peer(device: torch.device) -> None:
    """Use another GPU's memory as the slow memory of this process from now on; raises as
    `PeerMemory`.
    """
    PeerMemory(device)
    memory_tier.of_gpu = PeerMemory
