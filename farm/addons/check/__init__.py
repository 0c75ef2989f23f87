"""The check of cards: is a card as fast as its kind, and as it was?

Read first: `requested` lists what a check measures, `figures` its figures, `population` the
readings to compare with, `deviation` the statistics, and `card_check` the result. `regular` is for
checks by workers. `addon`, `commands`, `tables` and `page` show checks."""
