"""No read or write of the broker waits for ever, whether its connection became half-open or its
answer comes by halves."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial

import pytest
import redis
from kombu import Exchange, Queue

from farm.settings import Settings
from tasks import transport
from tasks.app import app, configure
from tasks.servers import BrokerServer
from tests.farms import TIMEOUT_S
from tests.half_open import HalfOpenProxy

DEADLINE_S = 0.3
DIRECT = Queue("direct", Exchange("direct"), routing_key="direct")
FANOUT = Queue("listener", Exchange("fanout", type="fanout"), auto_delete=True)


@pytest.fixture
def proxy(broker, monkeypatch):
    """A proxy in front of the broker. The application uses it, with short deadlines."""
    deadlines = {"socket_timeout": DEADLINE_S, "health_check_interval": DEADLINE_S}
    monkeypatch.setattr("tasks.app.TRANSPORT_OPTIONS", {**transport.TRANSPORT_OPTIONS, **deadlines})
    monkeypatch.setattr(transport, "HEALTH_CHECK_S", DEADLINE_S)
    monkeypatch.setattr(transport.Subscription.parse_response, "__defaults__", (False, DEADLINE_S))
    with HalfOpenProxy(broker.socket) as proxy:
        configure(Settings(broker_url=f"redis://{proxy.address}:{proxy.port}/0"))
        yield proxy
        configure(Settings())


def ends(action):
    """Return what an action returns or raises. It runs in a thread, so that a test fails if it
    waits for ever.
    """
    results = []

    def run():
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert results, "it waits for ever"
    return results[0]


def publish(connection, text, queue=DIRECT):
    connection.Producer().publish(
        text, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue]
    )


def test_a_command_over_a_half_open_connection_is_sent_again_over_a_new_one(broker, proxy):
    with app.connection_for_write() as connection, redis.Redis.from_url(broker.redis_url) as client:
        publish(connection, "first")
        assert proxy.freeze() > 0
        assert ends(lambda: publish(connection, "second")) is None
        assert client.llen("direct") == 2


def receive(connection, messages, number, send):
    """Send and receive until there are so many messages: a broker sends some into a connection that
    is lost.
    """
    while len(messages) < number:
        send()
        with contextlib.suppress(TimeoutError, *connection.connection_errors):
            connection.drain_events(timeout=DEADLINE_S)


@pytest.mark.parametrize("queue", [DIRECT, FANOUT])
def test_a_program_gets_messages_after_its_connections_became_half_open(broker, proxy, queue):
    """Flower, for one, has no event loop, in which kombu checks subscriptions."""
    messages = []

    def take(body, message):
        messages.append(body)
        message.ack()

    with (
        app.connection_for_read() as connection,
        app.connection_for_write(broker.url) as other,
        connection.Consumer(queue, callbacks=[take]),
    ):
        receive(connection, messages, 1, partial(publish, other, "before", queue))
        assert proxy.freeze() > 0
        messages.clear()
        send = partial(publish, other, "after", queue)
        assert ends(lambda: receive(connection, messages, 1, send)) is None
    assert messages[0] == "after"


def test_a_message_of_which_only_the_beginning_arrives_does_not_hold_up_a_consumer(broker, proxy):
    with (
        app.connection_for_read() as connection,
        app.connection_for_write(broker.url) as other,
        connection.Consumer(FANOUT),
    ):
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=DEADLINE_S)  # it subscribes
        proxy.freeze(after_bytes=100)
        publish(other, "x" * 1000, FANOUT)
        error = ends(lambda: connection.drain_events(timeout=TIMEOUT_S))
        assert isinstance(error, connection.connection_errors), error
        assert "Timeout reading" in str(error)


def test_a_message_that_cannot_be_acknowledged_is_not_waited_for():
    """Otherwise a card would never ask for another one."""
    with BrokerServer() as broker, app.connection_for_read(broker.url) as connection:
        messages = []
        with connection.Consumer(
            DIRECT, callbacks=[lambda body, message: messages.append(message)]
        ) as consumer:
            consumer.qos(prefetch_count=1)
            publish(connection, "first")
            receive(connection, messages, 1, lambda: None)
            assert not consumer.channel.qos.can_consume()
            broker.kill()
            with pytest.raises(connection.connection_errors):
                messages[0].ack()
            assert consumer.channel.qos.can_consume()


def test_a_worker_sends_no_event_again_and_again_while_its_broker_is_away():
    with BrokerServer() as broker, app.connection_for_write(broker.url) as connection:
        dispatcher = app.events.Dispatcher(connection)
        dispatcher.send("worker-heartbeat", retry=True)
        broker.kill()
        assert ends(lambda: dispatcher.send("worker-heartbeat", retry=True)) is None
        broker.start()
        with app.events.Dispatcher(connection) as later:
            later.extend_buffer(dispatcher)
            later.flush()
            assert not later._outbound_buffer


@pytest.mark.parametrize("over_network", [True, False])
def test_every_connection_has_deadlines(broker, over_network):
    """Those of commands, those of BRPOP and subscriptions, and those of the result backend."""
    with HalfOpenProxy(broker.socket) as proxy:
        url = f"redis://{proxy.address}:{proxy.port}/0" if over_network else broker.url
        configure(Settings(broker_url=url))
        with app.connection_for_read() as connection:
            channel = connection.default_channel
            for pool in (channel.pool, channel.async_pool, app.backend.client.connection_pool):
                made = pool.get_connection()
                assert made._sock.gettimeout() == transport.ANSWER_TIMEOUT_S > channel.brpop_timeout
                assert made.health_check_interval == transport.HEALTH_CHECK_S
                if over_network:
                    assert made.socket_connect_timeout == transport.CONNECT_TIMEOUT_S
                    assert made._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    assert made._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
                pool.release(made)
        configure(Settings())
