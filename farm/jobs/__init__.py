"""From a request to items and back: planning, the life of jobs and items, moving, closing a round, the cards."""
