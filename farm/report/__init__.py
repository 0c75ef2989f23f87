"""Reports on jobs, readings and models, computed from the rows of the database.

Read first: `report` computes the report of a job; `layers`, `owners`, `kernels` and `placements`
are its parts, and `why` is the answer of `--why`. `compare` makes a `comparison` of two sides
(`compared_side`, `matching`, `compared_rows`, `compared_kernels`), and `gate` judges it. `lookup`
finds readings, `operators` and `models` list without measuring."""
