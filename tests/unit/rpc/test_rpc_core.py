"""Opening, closing and heartbeats of both sides' cores against each other; time is a number."""

from __future__ import annotations

import pytest
from rpc_cores import DECODE, RAW, ROUTER, Ask, closing_error, exchange, open_pair, opening_pair

from pd_core.errors import (
    InvalidTransition,
    LayoutMismatch,
    Overloaded,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from pd_rpc.connection import ConnectionState, Opened, PeerProved
from pd_rpc.frames import encode_frame
from pd_rpc.limits import RpcLimits
from pd_rpc.server_core import CallReceived
from pd_rpc.wire import Call, Ping, encode

# handshake and closing


def test_both_sides_open_and_know_each_other():
    client, server = opening_pair()
    events = exchange(client, server)
    assert sorted(events, key=str) == [Opened(DECODE), Opened(ROUTER)]
    assert client.peer == DECODE
    assert server.peer == ROUTER
    assert client.state is server.state is ConnectionState.OPEN


def test_a_refusal_by_the_owner_reaches_the_other_side_as_the_same_error():
    client, server = opening_pair()
    server.receive(client.data_to_send(0.0), 0.0)
    assert client.receive(server.data_to_send(0.0), 0.0) == [PeerProved(DECODE)]
    client.accept()
    assert server.receive(client.data_to_send(0.0), 0.0) == [PeerProved(ROUTER)]
    server.close(LayoutMismatch("fp32 here, bf16 there"))
    error = closing_error(client.receive(server.data_to_send(0.0), 0.0))
    assert isinstance(error, LayoutMismatch)
    assert error.message == "fp32 here, bf16 there"


def test_a_server_may_refuse_before_it_has_said_hello():
    client, server = opening_pair()
    server.data_to_send(0.0)
    _, refusing = opening_pair()
    refusing.data_to_send(0.0)
    refusing.close(Overloaded("full", retry_after_s=1.0))
    error = closing_error(client.receive(refusing.data_to_send(0.0), 0.0))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.0


def test_long_frames_are_refused_until_the_peer_has_proved_itself():
    limits = RpcLimits(max_hello_bytes=1000, max_body_bytes=10_000)
    _, server = opening_pair(limits)
    error = closing_error(server.receive(encode_frame(bytes(1001)), 0.0))
    assert isinstance(error, ProtocolError)
    assert "at most 1000" in error.message
    client, server = open_pair(limits)
    client.open_call(Ask("x" * 5000), 1.0, 1)
    assert isinstance(exchange(client, server)[0], CallReceived)


def test_close_tells_the_peer_why():
    client, server = open_pair()
    assert closing_error(server.close(WorkerLost("shutting down"))).message == "shutting down"
    assert closing_error(exchange(client, server)).message == "shutting down"
    client, server = open_pair()
    assert closing_error(client.close(None)) is None
    assert closing_error(exchange(client, server)) is None


def test_a_closed_connection_ignores_bytes_and_refuses_everything_else():
    client, _ = open_pair()
    call_id = client.open_call(Ask("a"), 1.0, 1)
    client.close(None)
    assert client.receive(b"garbage", 1.0) == []
    assert client.receive_eof("gone") == []
    assert client.tick(1000.0) == []
    assert client.next_tick_s() is None
    for illegal in (
        lambda: client.open_call(Ask("b"), 1.0, 1),
        lambda: client.cancel(call_id),
        lambda: client.grant(call_id, 1),
        lambda: client.close(None),
    ):
        with pytest.raises(InvalidTransition):
            illegal()


def test_calls_before_the_connection_is_open_are_illegal_on_our_side_and_fatal_on_theirs():
    client, server = opening_pair()
    with pytest.raises(InvalidTransition):
        client.open_call(Ask("a"), 1.0, 1)
    call = encode_frame(encode(Call(1, 1.0, 1, RAW)))
    assert isinstance(closing_error(server.receive(call, 0.0)), ProtocolError)


@pytest.mark.parametrize("inside", [True, False])
def test_eof_is_a_lost_worker_when_open_and_an_unavailable_one_before(inside):
    client, _ = open_pair()
    client.receive(b"KVRP" if inside else b"", 0.0)
    error = closing_error(client.receive_eof("reset"))
    assert isinstance(error, WorkerLost)
    assert ("inside a frame" in error.message) is inside
    client, _ = opening_pair()
    error = closing_error(client.receive_eof("reset"))
    assert isinstance(error, Unavailable)
    assert not isinstance(error, WorkerLost)


# heartbeats, in virtual time


def test_a_side_that_has_sent_nothing_for_a_second_pings():
    client, _ = open_pair()
    assert client.next_tick_s() == 1.0
    client.tick(0.99)
    assert client.num_unsent_bytes == 0
    client.tick(1.0)
    assert client.data_to_send(1.0) == encode_frame(encode(Ping()))
    assert client.next_tick_s() == 2.0


def test_what_was_sent_anyway_spares_the_ping():
    client, _ = open_pair()
    client.open_call(Ask("a"), 1.0, 1)
    client.data_to_send(0.5)
    client.tick(1.1)
    assert client.num_unsent_bytes == 0
    assert client.next_tick_s() == 1.5


def test_two_idle_sides_keep_each_other_alive_for_an_hour():
    client, server = open_pair()
    now_s = 0.0
    while now_s < 3600.0:
        now_s = min(client.next_tick_s(), server.next_tick_s())
        assert client.tick(now_s) == server.tick(now_s) == []
        assert exchange(client, server, now_s) == []


def test_a_silent_peer_is_lost_after_ten_seconds():
    client, _ = open_pair()
    for tenths in range(1, 100):
        assert client.tick(tenths / 10) == []
        client.data_to_send(tenths / 10)
    error = closing_error(client.tick(10.0))
    assert isinstance(error, WorkerLost)
    assert "decode 'decode-0' was silent for 10.0 s" in error.message


def test_single_bytes_of_a_long_frame_count_as_life():
    client, _ = open_pair()
    client.receive(b"K", 9.0)
    assert client.tick(18.9) == []
    assert isinstance(closing_error(client.tick(19.0)), WorkerLost)


def test_a_handshake_that_does_not_end_in_time_is_given_up_however_many_bytes_come():
    _, server = opening_pair()
    assert server.next_tick_s() == 5.0
    server.receive(b"KV", 4.9)
    assert server.tick(4.99) == []
    error = closing_error(server.tick(5.0))
    assert isinstance(error, Unavailable)
    assert "no handshake within 5 s" in error.message
