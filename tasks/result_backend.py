"""The result backend without listeners.

Celery's Redis backend subscribes the publisher to the result of every message it sends, and a chord's group result
to all of its parts: thousands of subscriptions for results that nobody in the farm waits for, since progress is read
from the database. Results are ignored (`task_ignore_result`); this one only counts chord parts.
"""

from __future__ import annotations

from typing import Any

from celery.backends.redis import RedisBackend


class StoredResults(RedisBackend):
    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do not subscribe to the result of a message just sent."""

    def add_pending_result(self, result: Any, weak: bool = False, start_drainer: bool = True) -> Any:
        """Do not wait for a result object."""
        return result

    def remove_pending_result(self, result: Any) -> Any:
        return result
