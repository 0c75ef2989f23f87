"""The shared database.

Read first: `tables` has the tables, `database` connects and makes sessions, and `item_state` has
the states of an item. `content` stores and finds rows by the hash of their content, `captures`
stores captures, and `reuse` finds readings that serve again. `query` selects readings by filters on
the columns of `data_columns`; `columns` is for queries that return plain rows. `job_ids` and
`card_models` find jobs and card models. `upgrades` decides which program may upgrade a schema
(`migrations/`), `pruning` deletes old rows, and `postgresql` limits how long a connection waits."""
