"""Slow memory, and the memory of training steps.

Read first: `step_memory` computes the memory of a step over time, `transfers` the moves to slow
memory, `offload_plan` decides which tensors move, with the times of `slow_costs`, and `plans` has
plans as rows. On a card: `memory_tier` is slow memory, `offload` runs one operator with it,
`planned_step` a step, `step_on_card` captures and runs a step of this host, and `handlers` answer
the `requests` to the benchmark process. `requested` computes what the command shows. `fits` says
whether a module fits into a card, and `queries` has the functions of Python. `addon`, `commands`,
`memory_options`, `tables` and `files` are the command."""
