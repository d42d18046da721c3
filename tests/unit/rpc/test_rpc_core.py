"""The cores of both sides against each other and against nonsense; time is a number."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_cores import DECODE, ROUTER, Answer, Ask, exchange, open_pair, opening_pair

from pd_core.errors import (
    AuthenticationFailed,
    InvalidTransition,
    KvrelayError,
    LayoutMismatch,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from pd_rpc.client_core import CallEnded, CallFailed, ItemReceived
from pd_rpc.connection import ConnectionClosed, ConnectionState, Opened, PeerProved
from pd_rpc.frames import encode_frame
from pd_rpc.limits import MAX_CREDIT, RpcLimits
from pd_rpc.server_core import CallCancelled, CallReceived, CreditGranted
from pd_rpc.wire import Call, Cancel, Close, Credit, End, Item, Ping, Ready, encode

RAW = msgspec.Raw(encode(Answer(0)))


def closing_error(events):
    """The error of the one ConnectionClosed, which must be the last event."""
    assert [isinstance(event, ConnectionClosed) for event in events].count(True) == 1
    assert isinstance(events[-1], ConnectionClosed)
    return events[-1].error


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


def test_a_side_that_has_sent_nothing_for_half_a_second_pings():
    client, _ = open_pair()
    assert client.next_tick_s() == 0.5
    client.tick(0.49)
    assert client.num_unsent_bytes == 0
    client.tick(0.5)
    assert client.data_to_send(0.5) == encode_frame(encode(Ping()))
    assert client.next_tick_s() == 1.0


def test_what_was_sent_anyway_spares_the_ping():
    client, _ = open_pair()
    client.open_call(Ask("a"), 1.0, 1)
    client.data_to_send(0.4)
    client.tick(0.6)
    assert client.num_unsent_bytes == 0
    assert client.next_tick_s() == 0.9


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


# calls


def test_a_call_runs_from_question_to_end():
    client, server = open_pair()
    call_id = client.open_call(Ask("why"), 2.5, credit=2)
    (received,) = exchange(client, server)
    assert (received.call_id, received.deadline_s) == (call_id, 2.5)
    assert msgspec.msgpack.decode(received.body, type=Ask) == Ask("why")
    server.send_item(call_id, Answer(0))
    server.send_item(call_id, Answer(1))
    server.end(call_id)
    events = exchange(client, server)
    assert [msgspec.msgpack.decode(e.body, type=Answer).index for e in events[:2]] == [0, 1]
    assert events[2:] == [CallEnded(call_id)]
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


@pytest.mark.parametrize(
    "messages",
    [
        [Call(0, 1.0, 1, RAW)],
        [Call(5, 1.0, 1, RAW), Call(5, 1.0, 1, RAW)],
        [Call(5, 1.0, 1, RAW), Call(4, 1.0, 1, RAW)],
        [Call(1, 0.0, 1, RAW)],
        [Call(1, -1.0, 1, RAW)],
        [Call(1, float("nan"), 1, RAW)],
        [Call(1, float("inf"), 1, RAW)],
        [Call(1, 1.0, 0, RAW)],
        [Call(1, 1.0, MAX_CREDIT + 1, RAW)],
        [Call(1, 1.0, MAX_CREDIT, RAW), Credit(1, 1)],
        [Call(1, 1.0, 1, RAW), Credit(1, 0)],
        [Call(1, 1.0, 1, RAW), Credit(1, -1)],
        [Cancel(1)],
        [Call(1, 1.0, 1, RAW), Cancel(2)],
        [Credit(1, 1)],
        [Ready()],
        [Item(1, RAW)],
        [End(1)],
    ],
)
def test_a_server_closes_on_messages_that_make_no_sense(messages):
    _, server = open_pair()
    data = b"".join(encode_frame(encode(message)) for message in messages)
    assert isinstance(closing_error(server.receive(data, 0.0)), ProtocolError)


@pytest.mark.parametrize(
    "messages",
    [
        [Item(1, RAW), Item(1, RAW)],
        [Item(2, RAW)],
        [End(2)],
        [End(1), End(1)],
        [End(1), Item(1, RAW)],
        [Call(1, 1.0, 1, RAW)],
        [Cancel(1)],
        [Ready()],
    ],
)
def test_a_client_closes_on_messages_that_make_no_sense(messages):
    client, _ = open_pair()
    client.open_call(Ask("why"), 1.0, credit=1)
    data = b"".join(encode_frame(encode(message)) for message in messages)
    assert isinstance(closing_error(client.receive(data, 0.0)), ProtocolError)


CALL_HEAD = b"\x95\xa4call\x01\x01\x01"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\xc0",
        b"\x91\xa4nope",
        CALL_HEAD + b"\xdd\xff\xff\xff\xff",  # an array that claims 4 G elements
        CALL_HEAD + b"\xdf\xff\xff\xff\xff",  # a map that does
        CALL_HEAD + b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        CALL_HEAD + b"\xdb\xff\xff\xff\xff",  # a string
        CALL_HEAD + b"\x91" * 100_000 + b"\xc0",  # nested deeper than any stack
        CALL_HEAD[:-1],
        CALL_HEAD,
        b"\x91\xa4ping" + b"\x00",
    ],
)
def test_a_body_that_is_no_message_closes_the_connection(body):
    _, server = open_pair()
    assert isinstance(closing_error(server.receive(encode_frame(body), 0.0)), ProtocolError)


def test_fields_that_a_later_version_adds_are_ignored():
    _, server = open_pair()
    later = encode(["cancel", 1, "because"])
    call = encode(Call(1, 1.0, 1, RAW))
    events = server.receive(encode_frame(call) + encode_frame(later), 0.0)
    assert events[1:] == [CallCancelled(1)]


@given(st.binary(max_size=300))
def test_garbage_bodies_give_events_or_a_protocol_error_and_nothing_else(body):
    client, server = open_pair()
    client.open_call(Ask("why"), 1.0, 1)
    for core in (client, server):
        events = core.receive(encode_frame(body), 0.0)
        said_close = body == encode(Close(None))
        if core.state is ConnectionState.CLOSED and not said_close:
            assert isinstance(closing_error(events), KvrelayError)


def conversation() -> tuple[bytes, list[object]]:
    """What a client receives in one long talk, and the events that it makes of it."""
    client, server = open_pair()
    for _ in range(3):
        client.open_call(Ask("why"), 1.0, credit=10)
    exchange(client, server)
    for index in range(4):
        for call_id in (1, 2, 3):
            server.send_item(call_id, Answer(index))
    server.end(2)
    server.fail(3, Overloaded("full"))
    server.end(1)
    data = server.data_to_send(0.0)
    return data, [describe(event) for event in client.receive(data, 0.0)]


def describe(event: object) -> object:
    match event:
        case ItemReceived(call_id=call_id, body=body):
            return call_id, msgspec.msgpack.decode(body, type=Answer)
        case CallFailed(call_id=call_id, error=error):
            return call_id, type(error), error.message
        case _:
            return event


TALK, TALK_EVENTS = conversation()


@given(st.lists(st.integers(0, len(TALK)), max_size=12))
def test_bytes_cut_anywhere_give_the_same_events(cuts):
    client, _ = open_pair()
    for _ in range(3):
        client.open_call(Ask("why"), 1.0, credit=10)
    cuts = [0, *sorted(cuts), len(TALK)]
    events = []
    for start, end in itertools.pairwise(cuts):
        events += client.receive(TALK[start:end], 0.0)
    assert [describe(event) for event in events] == TALK_EVENTS


@given(st.integers(0, len(TALK) * 8 - 1))
def test_a_flipped_bit_never_changes_an_answer(bit):
    data = bytearray(TALK)
    data[bit // 8] ^= 1 << bit % 8
    client, _ = open_pair()
    for _ in range(3):
        client.open_call(Ask("why"), 1.0, credit=10)
    events = client.receive(bytes(data), 0.0) + client.receive_eof("reset")
    assert isinstance(closing_error(events), ProtocolError | WorkerLost)
    before = [describe(event) for event in events[:-1]]
    assert before == TALK_EVENTS[: len(before)]
    assert len(before) < len(TALK_EVENTS)


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_in_the_handshake_never_lets_anybody_in(data):
    client, server = opening_pair()
    flip_in = data.draw(st.integers(0, 1))
    for turn in range(2):
        wire = bytearray(client.data_to_send(0.0))
        if turn == flip_in:
            bit = data.draw(st.integers(0, len(wire) * 8 - 1))
            wire[bit // 8] ^= 1 << bit % 8
        events = server.receive(bytes(wire), 0.0)
        if turn == flip_in:
            break
        client.receive(server.data_to_send(0.0), 0.0)
    events += server.receive_eof("reset")
    error = closing_error(events)
    assert isinstance(error, ProtocolError | Unavailable | AuthenticationFailed)
    assert not any(isinstance(event, PeerProved) for event in events)
