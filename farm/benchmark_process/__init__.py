"""The process that owns the CUDA context of a card.

Read first: `client` starts the process and sends it `requests`; `server` is the process, and
`handlers` answer its requests. `group` controls one process for each card of a group."""
