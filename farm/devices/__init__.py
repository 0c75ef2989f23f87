"""The cards of this host and their sensors, without torch.

Read first: `device` is the contract of a card, `vendor` that of a vendor, and `host` finds cards
and opens them. The vendors: `nvidia` with `nvml`, `nvidia_errors` and `nvidia_links`; `amd`; `cpu`;
`simulated`. `queried` is what NVIDIA and AMD cards share. `lock` gives a card to one process at a
time, `quiet` pauses compilations while a measurement depends on the processor, and `software` reads
the versions of the installed software."""
