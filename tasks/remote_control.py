"""What a worker does when it is told to over the broker, by Flower, by ``farm doctor``, or by whoever else reaches it.

Only a worker loads this file: it knows Celery's own commands then, and refuses most of them.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import Panel, inspect_command

from farm.devices.installed import program_versions
from tasks.broker_checks import QUESTION

#: All that a worker does for others. Not among them, of what Celery knows:
#:   add_consumer, cancel_consumer           a card has its one queue; without it, it is deaf until a restart
#:   pool_grow, pool_shrink, autoscale       a card has its one process: two would measure at once, none never
#:   rate_limit, time_limit                  hold back, or kill, every item from then on
#:   revoke_by_stamped_headers, election     for messages and workers that the farm has not; they fill memory
#:   hello                                   takes over what another worker, so called, has revoked
#:   disable_events                          blinds Flower for everybody
#:   objgraph, memsample, memdump, report    write files or tell of the process what nobody here asks
ALLOWED = frozenset(
    {
        # Looking, as `farm doctor` and Flower do. Celery masks the passwords in `conf` and `stats`.
        *(QUESTION, "ping", "clock", "conf", "stats", "active_queues", "registered"),
        *("active", "reserved", "scheduled", "revoked", "query_task"),
        # Flower hears events only from who was told to send them, and of workers only from these.
        *("enable_events", "heartbeat"),
        # What `farm flower --writable` is for. They mend themselves: an item whose message was revoked is published again,
        # one that was terminated is begun again, and a worker that was shut down is started again.
        *("revoke", "terminate", "shutdown"),
    }
)

_loaded = program_versions()


@inspect_command(name=QUESTION)
def farm_versions(_state: Any) -> dict[str, str]:
    """The versions of the farm and of what it runs on: what was loaded as the worker started, whatever is installed by now.

    Readings are kept apart by torch, CUDA, cuDNN and driver, which stand in the database with each card. The rest does not.
    """
    return _loaded


def _refuse(_state: Any, **_: Any) -> dict[str, str]:
    return {"error": "refused: it would keep the farm from measuring (tasks/remote_control.py)"}


for _name in set(Panel.data) - ALLOWED:
    Panel.data[_name] = _refuse
