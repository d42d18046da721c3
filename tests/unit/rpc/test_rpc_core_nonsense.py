"""The cores of both sides against messages without sense, garbage, and bytes cut or flipped anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_cores import RAW, Answer, Ask, answers, closing_error, exchange, open_pair, opening_pair

from pd_core.errors import (
    AuthenticationFailed,
    KvrelayError,
    Overloaded,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from pd_rpc.client_core import CallFailed, ItemsReceived
from pd_rpc.connection import ConnectionState, PeerProved
from pd_rpc.frames import encode_frame
from pd_rpc.limits import MAX_CREDIT, MAX_FRAME_ITEMS
from pd_rpc.server_core import CallCancelled
from pd_rpc.wire import Call, Cancel, Close, Credit, End, Items, Ready, encode


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
        [Items([1], [RAW])],
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
        [Items([1], [RAW]), Items([1], [RAW])],
        [Items([1, 1], [RAW, RAW])],
        [Items([2], [RAW])],
        [Items([1, 2], [RAW, RAW])],
        [Items([1], [])],
        [Items([], [RAW])],
        [End(2)],
        [End(1), End(1)],
        [End(1), Items([1], [RAW])],
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


@pytest.mark.parametrize(
    "lists",
    [
        b"\xdd\xff\xff\xff\xff",  # ids: an array that claims 4 G elements
        b"\x91\x01\xdd\xff\xff\xff\xff",  # bodies: the same
        b"\x91\x01",
        b"\x91\xc0\x91\xc0",  # an id that is no number
        encode([1] * (MAX_FRAME_ITEMS + 1)) + encode([0] * (MAX_FRAME_ITEMS + 1)),
    ],
)
def test_a_frame_of_items_that_cannot_be_or_has_too_many_closes_the_connection(lists):
    client, _ = open_pair()
    client.open_call(Ask("why"), 1.0, credit=MAX_CREDIT)
    assert isinstance(closing_error(client.receive(encode_frame(b"\x93\xa5items" + lists), 0.0)), ProtocolError)


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
        case ItemsReceived():
            return answers(event)
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
