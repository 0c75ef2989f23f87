"""From a request to items and back: planning, the life of jobs and items, moving, closing a round, the cards.

In the order of a job's life: `create` captures a model and opens a job; `rounds` makes the items of a round and
`balance` places them on cards; `item_driver` measures items on one card, with claims and results from `items` and the
transitions of `item_state`, and keeps readings in a spool while the database is away; `moving` moves items between
cards; `rounds` judges a round and plans the next. `jobs` finds, cancels and retries jobs. `cards` registers cards and
selects those of a command, and `listing` lists jobs and cards.
"""
