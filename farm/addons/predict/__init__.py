"""Predict time, power and energy of operators that have no reading.

Read first: `call_features` describes a call, and `dataset` makes training data of readings.
`predictors` fits predictors by name, from `tile_roofline` with `kernel_rules`, `gaussian_process`
and `regressors`; `transfer` predicts one card model from another. `calibration` and `floor` bound
intervals, `evaluation` tests on left-out `families`, and `stored_predictor` is the file of a
predictor.

Estimates of models: `estimating` adds readings and predictions to an `estimate`. Its parts:
`collectives`, `rank_effects`, `reading_sum`, `routing`, and for compiled models `compiled_models`,
`compiled_predictor` and `generated_kernels`. Built on estimates: `generation`, `side_by_side`,
`why`, `summary`, `next_measurements`. `query` and `queries` are for commands and programs; `addon`,
`commands`, `estimate_command`, `tables` and `plots` show results."""
