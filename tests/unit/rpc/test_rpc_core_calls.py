"""Calls between the cores of both sides; time is a number."""

from __future__ import annotations

import msgspec
import pytest
from rpc_cores import Answer, Ask, answers, exchange, open_pair

from pd_core.errors import (
    InvalidTransition,
    KvrelayError,
    Overloaded,
    PayloadTooLarge,
)
from pd_rpc.client_core import CallEnded, CallFailed
from pd_rpc.connection import ConnectionState
from pd_rpc.limits import RpcLimits
from pd_rpc.server_core import CallCancelled, CallReceived, CreditGranted


def test_a_call_runs_from_question_to_end():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 2.5, credit=2)
    (received,) = exchange(client, server)
    assert (received.call_id, received.deadline_s) == (call_id, 2.5)
    assert msgspec.msgpack.decode(received.body, type=Ask) == Ask("why")
    server.send_item(call_id, Answer(0))
    server.send_item(call_id, Answer(1))
    server.end(call_id)
    received, ended = exchange(client, server)
    assert answers(received) == [(call_id, 0), (call_id, 1)]
    assert ended == CallEnded(call_id)
    assert client.num_calls == server.num_calls == 0


def test_a_failure_travels_as_the_error_that_it_was():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 1.0, 1)
    exchange(client, server)
    server.fail(call_id, Overloaded("no blocks", param="tokens", retry_after_s=2.0))
    (failed,) = exchange(client, server)
    assert isinstance(failed, CallFailed)
    assert isinstance(failed.error, Overloaded)
    assert (failed.error.message, failed.error.param, failed.error.retry_after_s) == ("no blocks", "tokens", 2.0)


def test_an_endless_error_sentence_is_cut():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 1.0, 1)
    exchange(client, server)
    server.fail(call_id, Overloaded("x" * 20_000_000))
    (failed,) = exchange(client, server)
    assert isinstance(failed.error, Overloaded)
    assert failed.error.message == "x" * 4096 + " ..."


def test_no_item_is_sent_without_credit():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 1.0, credit=1)
    exchange(client, server)
    server.send_item(call_id, Answer(0))
    with pytest.raises(InvalidTransition, match="no credit"):
        server.send_item(call_id, Answer(1))
    client.grant(call_id, 2)
    assert CreditGranted(call_id) in exchange(client, server)
    assert server.credit(call_id) == 2


def test_a_cancelled_call_drops_what_is_on_the_way_and_is_known_until_the_server_ends_it():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 1.0, credit=5)
    exchange(client, server)
    server.send_item(call_id, Answer(0))
    client.cancel(call_id)
    assert exchange(client, server) == [CallCancelled(call_id)]
    assert client.num_calls == 1
    assert server.is_cancelled(call_id)
    with pytest.raises(InvalidTransition, match="cancelled"):
        server.send_item(call_id, Answer(1))
    with pytest.raises(InvalidTransition):
        client.cancel(call_id)
    server.end(call_id)
    assert exchange(client, server) == []
    assert client.num_calls == server.num_calls == 0


def test_cancel_and_credit_that_cross_the_end_are_ignored():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 1.0, credit=5)
    exchange(client, server)
    server.end(call_id)
    client.grant(call_id, 3)
    client.cancel(call_id)
    assert exchange(client, server) == []
    assert server.state is ConnectionState.OPEN
    assert client.num_calls == 0


def test_calls_beyond_the_bound_are_answered_with_overloaded_and_the_others_go_on():
    client, server = open_pair(RpcLimits(max_calls=2))
    ids = [client.open_call(Ask("why"), 1.0, 1) for _ in range(3)]
    events = exchange(client, server)
    assert [e.call_id for e in events if isinstance(e, CallReceived)] == ids[:2]
    (failed,) = [e for e in events if isinstance(e, CallFailed)]
    assert failed.call_id == ids[2]
    assert isinstance(failed.error, Overloaded)
    server.end(ids[0])
    exchange(client, server)
    client.open_call(Ask("now"), 1.0, 1)
    assert isinstance(exchange(client, server)[0], CallReceived)


def test_what_does_not_fit_into_a_frame_is_refused_before_it_is_sent():
    client, server = open_pair(RpcLimits(max_body_bytes=1000))
    with pytest.raises(PayloadTooLarge, match="a frame holds 1000"):
        client.open_call(Ask("x" * 1000), 1.0, 1)
    assert client.num_unsent_bytes == client.num_calls == 0
    call_id = client.open_call(Ask("x"), 1.0, 1)
    exchange(client, server)
    with pytest.raises(KvrelayError, match="a frame holds 1000"):
        server.send_item(call_id, Ask("x" * 1000))
    assert server.credit(call_id) == 1


def test_what_a_server_may_not_do_raises():
    _, server = open_pair()
    for illegal in (
        lambda: server.send_item(1, Answer(0)),
        lambda: server.end(1),
        lambda: server.fail(1, KvrelayError("x")),
        lambda: server.credit(1),
        server.accept,
        server.start,
    ):
        with pytest.raises(InvalidTransition):
            illegal()
    assert server.num_unsent_bytes == 0
