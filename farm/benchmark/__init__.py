"""From a subject and a protocol to a reading on one card.

Read first: `bench` makes a measurement from begin to end. `subjects/` builds the passes of each
kind of subject (`passes`), and `workload` arranges them in rounds. `policies` says how a window
begins and ends, `steady` runs it with the `clock` and the `sampler`, and `window` computes its
figures. After the window come the `phases/`.

Around a measurement: `torch_device`, `checks` of the card, its fingerprint (`fingerprinting`),
`counter_period` of its energy counter, and `cost_ledger` for the card time of each phase.
`verification` compares the calls on the card with their prediction. `call_context` and `cache` time
tuples among other operators, and `host_steps` puts passes with host steps in CUDA graphs. `ranks`
and `bus_rate` are for several cards. A CPU has its own runner: `cpu_runner`, `host_clock` and
`host_places`. `block` measures code of a caller, and `host_code` imports
libraries of operators and checks versions of the user's models."""
