"""From a user's input to a request: defaults, measurement files, selection of cards, memory limits."""
