"""From a request to items and back: planning, the life of jobs and items, moving, closing a round, the cards.

In the order of a job's life: `create` captures a model and opens a job; `planning` makes the items of a round and
`balance` places them on cards; `item_driver` measures items on one card, with claims and results from `items` and the
transitions of `item_state`; `spool` keeps readings while the database is away; `moving` moves items between cards;
`closing` judges a round and plans the next. `jobs` finds, cancels and retries jobs. `cards` registers cards,
`card_choice` selects those of a command, and `listing` lists jobs and cards.
"""
