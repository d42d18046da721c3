"""Items that wait together share a frame: how many, how long, in which order, and whose."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_cores import Answer, Ask, answers, exchange, open_pair

from pd_core.errors import KvrelayError, Overloaded
from pd_rpc.client_core import CallEnded, CallFailed, ClientConnection, ItemsReceived
from pd_rpc.frames import FrameReader
from pd_rpc.limits import MAX_CREDIT, MAX_FRAME_ITEMS, RpcLimits
from pd_rpc.server_core import ServerConnection

MAX_BODY_BYTES = 1000


def serving(num_calls: int, limits: RpcLimits = RpcLimits()) -> tuple[ClientConnection, ServerConnection]:  # noqa: B008
    """Both sides of a connection with calls 1 ... num_calls, of which any number of items may come."""
    client, server = open_pair(limits)
    for _ in range(num_calls):
        client.open_call(Ask("why"), 1.0, MAX_CREDIT)
    exchange(client, server)
    return client, server


def bodies(data: bytes) -> list[bytes]:
    """Of all frames in `data`."""
    reader = FrameReader(1 << 30)
    reader.feed(data)
    found = []
    while (body := reader.next_body()) is not None:
        found.append(body)
    return found


def messages(server: ServerConnection, now_s: float = 0.0) -> list[list]:
    return [msgpack.unpackb(body) for body in bodies(server.data_to_send(now_s))]


def test_items_that_wait_together_leave_in_one_frame_in_the_order_in_which_they_were_given():
    client, server = serving(3)
    for call_id, index in ((2, 0), (1, 0), (2, 1), (3, 0)):
        server.send_item(call_id, Answer(index))
    data = server.data_to_send(0.0)
    said = [{"type": "answer", "index": index} for index in (0, 0, 1, 0)]
    assert [msgpack.unpackb(body) for body in bodies(data)] == [["items", [2, 1, 2, 3], said]]
    (received,) = client.receive(data, 0.0)
    assert answers(received) == [(2, 0), (1, 0), (2, 1), (3, 0)]


def test_a_frame_is_made_when_bytes_are_asked_for_and_not_again():
    _, server = serving(1)
    server.send_item(1, Answer(0))
    assert [message[0] for message in messages(server)] == ["items"]
    assert server.num_unsent_bytes == 0
    assert messages(server) == []


def test_whatever_else_is_said_leaves_behind_the_items_that_were_given_before_it():
    client, server = serving(3)
    server.send_item(1, Answer(0))
    server.end(1)
    server.send_item(2, Answer(0))
    server.send_item(3, Answer(0))
    server.fail(2, Overloaded("full"))
    server.send_item(3, Answer(1))
    server.tick(1.0)
    server.send_item(3, Answer(2))
    server.close(None)
    data = server.data_to_send(1.0)
    tags = [msgpack.unpackb(body)[0] for body in bodies(data)]
    assert tags == ["items", "end", "items", "failed", "items", "ping", "items", "close"]
    events = client.receive(data, 1.0)
    assert events[1] == CallEnded(1)
    assert isinstance(events[3], CallFailed)
    received = [pair for event in events if isinstance(event, ItemsReceived) for pair in answers(event)]
    assert received == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]


def test_of_a_frame_only_items_of_calls_that_are_not_given_up_are_seen():
    client, server = serving(3)
    client.cancel(2)
    for call_id in (1, 2, 3, 2):
        server.send_item(call_id, Answer(call_id))
    (received,) = client.receive(server.data_to_send(0.0), 0.0)
    assert answers(received) == [(1, 1), (3, 3)]
    server.send_item(2, Answer(0))
    assert client.receive(server.data_to_send(0.0), 0.0) == []


def test_items_that_wait_count_as_unsent_bytes():
    _, server = serving(1)
    server.send_item(1, Answer(0))
    once = server.num_unsent_bytes
    server.send_item(1, Answer(0))
    assert 0 < once < server.num_unsent_bytes
    server.end(1)
    assert server.num_unsent_bytes == len(server.data_to_send(0.0))


def test_a_frame_has_no_more_items_than_its_reader_takes():
    client, server = serving(1)
    for index in range(2 * MAX_FRAME_ITEMS + 1):
        server.send_item(1, Answer(index))
    received = [answers(event) for event in client.receive(server.data_to_send(0.0), 0.0)]
    assert [len(items) for items in received] == [MAX_FRAME_ITEMS, MAX_FRAME_ITEMS, 1]
    assert [index for items in received for _, index in items] == list(range(2 * MAX_FRAME_ITEMS + 1))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, MAX_BODY_BYTES)), max_size=12))
def test_no_frame_of_items_is_longer_than_a_frame_may_be_and_no_item_is_lost(given_items):
    client, server = serving(3, RpcLimits(max_body_bytes=MAX_BODY_BYTES))
    sent = []
    for call_id, num_bytes in given_items:
        try:
            server.send_item(call_id, bytes(num_bytes))
        except KvrelayError:
            assert num_bytes > MAX_BODY_BYTES - 30
            continue
        sent.append((call_id, bytes(num_bytes)))
    data = server.data_to_send(0.0)
    assert all(len(body) <= MAX_BODY_BYTES for body in bodies(data))
    received = [pair for event in client.receive(data, 0.0) for pair in event.items]
    assert [(call_id, msgpack.unpackb(bytes(body))) for call_id, body in received] == sent


def test_an_item_that_fits_no_frame_is_refused_and_what_waits_stays():
    _, server = serving(1, RpcLimits(max_body_bytes=MAX_BODY_BYTES))
    server.send_item(1, Answer(0))
    num_unsent_bytes, credit = server.num_unsent_bytes, server.credit(1)
    with pytest.raises(KvrelayError, match="a frame holds 1000"):
        server.send_item(1, bytes(MAX_BODY_BYTES))
    assert (server.num_unsent_bytes, server.credit(1)) == (num_unsent_bytes, credit)
    assert messages(server) == [["items", [1], [{"type": "answer", "index": 0}]]]
