"""What Flower and other listeners hear of an item.

A measure task never raises for what happened on the card, since a chord whose part raises never runs its body. So
Celery takes every item for a success. Here its *event* says what it was: only what is told changes, neither the
message nor the result nor the chord.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.exceptions import Ignore
from celery.worker.request import Request


class ItemRequest(Request):  # type: ignore[misc]
    """The worker's side of one message; Celery makes it from `Task.Request`."""

    def send_event(self, type: str, **fields: Any) -> None:
        if type == "task-succeeded" and (reason := failure(fields.get("result"))):
            runtime_s = fields.get("runtime")
            super().send_event("task-failed", exception=reason, traceback="", runtime=runtime_s)
        else:
            super().send_event(type, **fields)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        told = super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        exception = exc_info.exception
        if isinstance(getattr(exception, "exc", exception), Ignore):
            # Celery says nothing of these, and Flower would show them as started for ever.
            self.send_event("task-declined", exception="nothing to do: closed, moved, or another worker has it")
        return told


def failure(result: object) -> str:
    """'out_of_memory: ...' from the text of a failed item's status, '' for any other result."""
    try:
        status = ast.literal_eval(str(result))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    if not isinstance(status, Mapping) or status.get("status") != "failed":
        return ""
    reason, message = status.get("reason") or "failed", status.get("message")
    return f"{reason}: {message}" if message else str(reason)


def tell_retry(task: Task, reason: str, message: str) -> None:
    """An attempt ended without an answer, and the item is begun again in the same task."""
    task.send_event("task-retried", exception=f"{reason}: {message}", traceback="")
