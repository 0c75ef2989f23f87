"""kombu's Redis transport, with a deadline for every read and write.

A NAT or a load balancer may forget a connection. Its packets vanish, and neither side learns of it.
kombu alone would then wait for ever: in a command, in an acknowledgement, and for the rest of a
message. The application, Flower and all programs that publish use this transport
(`tasks.message_filter`)."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from celery.app import events
from celery.events import EventDispatcher
from kombu.transport import redis, virtual
from redis.client import PubSub

#: The longest wait for a connection, and for an answer. A blocking command waits for a second, so
#: for less. Unit: s.
CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 5.0
#: A connection that was silent for so long has to answer a PING before its next command. Unit: s.
HEALTH_CHECK_S = 5.0


def _keepalive() -> Mapping[int, int]:
    """Return the options of a socket with which the system notices within 25 s that the other side
    is gone.
    """
    if sys.platform != "linux":
        return {}
    return {
        socket.TCP_KEEPIDLE: 10,
        socket.TCP_KEEPINTVL: 5,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: 20_000,  # ms
    }


#: The options of every connection to the broker. `retry_on_timeout`: a command without an answer is
#: sent once more, on a new connection. If both arrive, a message is in its queue twice, and the
#: second copy is declined.
TRANSPORT_OPTIONS: Mapping[str, Any] = {
    "socket_timeout": ANSWER_TIMEOUT_S,
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "socket_keepalive": True,
    "socket_keepalive_options": _keepalive(),
    "health_check_interval": HEALTH_CHECK_S,
    "retry_on_timeout": True,
}
#: The same for the result backend, which counts the parts of chords. redis-py sets its keepalive.
BACKEND_OPTIONS: Mapping[str, Any] = {
    "redis_socket_timeout": ANSWER_TIMEOUT_S,
    "redis_socket_connect_timeout": CONNECT_TIMEOUT_S,
    "redis_backend_health_check_interval": HEALTH_CHECK_S,
    "redis_retry_on_timeout": True,
}


class Acknowledgements(redis.QoS):  # type: ignore[misc]
    """The messages that this process has not acknowledged yet; as long as there is one, a card gets
    no other.
    """

    def ack(self, delivery_tag: str) -> None:
        with self._forgotten_if_it_fails(delivery_tag):
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        with self._forgotten_if_it_fails(delivery_tag):
            super().reject(delivery_tag, requeue=requeue)

    @contextlib.contextmanager
    def _forgotten_if_it_fails(self, delivery_tag: str) -> Iterator[None]:
        """Forget the message here if the broker does not answer: it delivers the message again, and
        that is declined. kombu would count it as unacknowledged for ever, and never ask for another
        message."""
        try:
            yield
        except Exception:
            virtual.QoS.ack(self, delivery_tag)
            raise


class Subscription(PubSub):
    """A subscription that kombu reads when its socket has data. It does not wait for ever for the
    rest of a message.
    """

    def parse_response(self, block: bool = False, timeout: float = ANSWER_TIMEOUT_S) -> Any:
        return super().parse_response(block=block, timeout=timeout)


class Channel(redis.Channel):  # type: ignore[misc]
    QoS = Acknowledgements

    @functools.cached_property
    def subclient(self) -> Subscription:
        return Subscription(self.async_pool)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        if asynchronous:
            # The event loop has to learn of a new socket: it must not be opened in the middle of a
            # command.
            parameters["retry_on_timeout"] = False
        return parameters


class Poller(redis.MultiChannelPoller):  # type: ignore[misc]
    """Reads the connections of a program without an event loop, such as Flower."""

    _checked_s = 0.0

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        """Read once. kombu checks whether subscriptions still answer only in programs with an event
        loop.
        """
        if time.monotonic() - self._checked_s > HEALTH_CHECK_S:
            self._checked_s = time.monotonic()
            with contextlib.suppress(RuntimeError):  # a subscription has no connection yet
                self.maybe_check_subclient_health()
        return super().get(callback, timeout)


class Transport(redis.Transport):  # type: ignore[misc]
    Channel = Channel

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cycle: Any = Poller()


class Dispatcher(EventDispatcher):  # type: ignore[misc]
    """Sends events for Flower, and no event twice.

    A worker sends its heartbeats in its main loop. Celery would try again there until the broker is
    back: the worker would neither notice that it has to stop, nor that its other connections are
    lost."""

    def send(self, type: str, retry: bool = False, **options: Any) -> Any:
        return super().send(type, retry=False, **options)


class Events(events.Events):  # type: ignore[misc]
    dispatcher_cls = "tasks.transport:Dispatcher"
