"""Jobs, their items and the cards: planning a job, measuring its items, moving items, closing its
rounds.

In the order of a job's life: `create` captures a model and opens a job. `rounds` creates the items
of a round and `balance` chooses their cards. `item_driver` measures items on one card and keeps
readings in a spool if the database is unreachable; `items` writes claims and results, `item_state`
defines the transitions. `moving` moves items between cards. `rounds` writes the verdict of a round
and plans the next round. `jobs` finds, cancels and retries jobs. `cards` registers cards and
selects the cards of a command. `listing` lists jobs and cards."""
