"""Compares the sum of a model's tuples with the whole model: figures, coverage, intervals, kernels,
and the outcome.

Read first: `job_results` loads the rows of a round. `figures` says what a sum uses of a reading,
`corrections` make the cost of one call in the model from it, `replay` corrects all calls together,
and a `cost_line` is the result for one tuple. `aggregate` computes the `verdict`: `sum_and_whole`
compares their sum with the whole, with the errors of `gap_errors`, and `judging` decides the
outcome. `causes` says why a model takes its time."""
