"""Jobs, their items and the cards: planning a job, measuring its items, moving items, closing its
rounds.

In the order of a job's life: `captures` captures a model and `create` opens its job. `rounds`
creates the items of a round and `balance` chooses their cards. `item_driver` measures items on one
card and keeps readings in a `spool` if the database is unreachable; `items` writes claims and
results, with the transitions of `farm.store.item_state`. `moving` moves items between cards.
`closing` writes the verdict of a round and plans the next round. `jobs` finds, cancels and retries
jobs. `cards` registers cards. `listing` lists jobs and cards."""
