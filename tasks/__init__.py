"""Celery: the messages, queues and processes of a farm. No physics.

Read first: `submissions` makes jobs of requests, `queues` publishes their messages, `measure` is
the task on the queue of a card, and `control` closes rounds and repairs. Processes: `supervisor`
starts the processes of a host, `main` and `worker` are one of them, and `embedded` is the farm of
`farm run` with the broker of `servers`. `heartbeats`, `reconciler` and `watchdog` keep a farm
alive. `app` configures Celery; `transport`, `message_filter` and `consumer` change how it reads
messages, and `broker_probe` tests a broker. `paired` alternates two requests, `card_checks` checks
cards regularly, `doctor/` has the checks of `farm doctor`. `metrics`, `flower` and `logs` show what
runs."""
