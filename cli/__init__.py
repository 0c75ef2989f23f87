"""The command line of the farm: `farm COMMAND`. Formatting and messages, no logic.

Read first: `main` runs a command and turns errors into messages, `commands` says where each command
is, and `options` has what commands share. Then `run`, with `follow` for the progress and the end of
jobs, and `report_tables` for the report. `output` writes results to stdout and messages to stderr;
`tables` and `lists` are the look of tables. The other modules are one command or group each."""
