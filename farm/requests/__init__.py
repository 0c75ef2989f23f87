"""Turns a user's input into requests: defaults, measurement files, selection of cards, memory
limits.

Read first: `partial_request` has what a user wrote, as options or in a `measurement_file`.
`resolved` adds the defaults and the model, for the cards of `card_selection`. `memory` checks that
the model fits."""
