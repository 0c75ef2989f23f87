"""Extracts the operators of a variant; builds and captures training steps, with the lifetime of
their tensors.

Read first: `extract` extracts the tuples of a forward pass or a step without a card. `step` is a
training iteration in its stages, `capture` records it at the dispatcher, and `tensor_lifetime` says
when each tensor exists. `observed_values` describes the values in the tensors. `card_functions`
runs PyTorch's functions as a card does, for a capture without a card. `captured_model` captures a
module of the caller, `module_memory` its tensors, and `version` is the version of a user's model.
Several cards: `split` and `streams`. Compiled variants: `fake_compilation` fills the compiler's
cache, `foreseen_kernels` lists kernels."""
