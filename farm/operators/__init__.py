"""From a model to its operator tuples, and from a tuple to an operator that runs. Needs torch.

Read first: a tuple is an `OperatorTuple` of `farm.types.tuple`. `capture` runs a model, on the fake
tensors of `fake_pass` or on real ones, and records its calls as tuples; `captured` has the data of
a capture. `rebuild` makes an operator from a tuple, with the values of `input_values` and
`deciding_values`. `self_check` rebuilds the tuples of a capture and compares what they run with the
calls of the model; `profiler` counts what runs without the recorder. `cost` computes the FLOPs and
bytes of a tuple, and `output_sizes` bounds a call before it uses memory.

Special parts of a capture: `unseen` notices what a capture cannot see. `higher_order`,
`grouped_products` and `fake_outputs` treat operators that run differently under fake tensors or on
other cards.

Compiled models: `compiler` compiles a model and observes its generated kernels, `compiled` captures
a pass of it, `foreseen_kernels` lists the kernels for a card without the card, and `compiler_cache`
removes damaged files of the compiler. Sweeps: `sweep_builder` makes the tuples of a grid."""
