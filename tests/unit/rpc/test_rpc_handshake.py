"""The states before the first call, over unframed bodies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpc_cores import DECODE, challenge

from pd_core.errors import InvalidTransition, KvrelayError, LayoutMismatch, ProtocolError, WorkerLost
from pd_rpc.auth import Side
from pd_rpc.handshake import Handshake, HandshakeState
from pd_rpc.wire import Close, Ping, Proof, Ready, encode


def started() -> tuple[Handshake, Handshake, bytes, bytes]:
    """Client, server, and both Hello bodies."""
    client, server = Handshake(challenge(Side.CLIENT)), Handshake(challenge(Side.SERVER))
    return client, server, client.start(), server.start()


def checking() -> tuple[Handshake, Handshake]:
    """Both have proved themselves."""
    client, server, of_client, of_server = started()
    client_proof, server_proof = client.receive(of_server), server.receive(of_client)
    assert client.receive(server_proof) is None
    assert server.receive(client_proof) is None
    return client, server


def test_both_are_done_when_both_have_accepted():
    client, server = checking()
    assert client.state is server.state is HandshakeState.CHECKING
    assert client.peer == DECODE
    ready = client.accept()
    assert client.state is HandshakeState.AWAITING_READY
    server.receive(ready)  # comes before the server has decided
    assert server.state is HandshakeState.CHECKING
    client.receive(server.accept())
    assert client.state is server.state is HandshakeState.DONE


def test_a_refusal_arrives_as_the_error_that_it_was():
    client, server = checking()
    client.accept()
    body = server.refuse(LayoutMismatch("fp32 here, bf16 there"))
    assert server.state is HandshakeState.FAILED
    with pytest.raises(LayoutMismatch, match="fp32 here, bf16 there"):
        client.receive(body)
    assert client.state is HandshakeState.FAILED


def test_a_peer_that_leaves_without_a_word_is_lost():
    client, *_ = started()
    with pytest.raises(WorkerLost):
        client.receive(encode(Close(None)))


@pytest.mark.parametrize("early", [encode(Proof(bytes(32))), encode(Ready()), encode(Ping()), b"", b"\xc1", b"\x90"])
def test_a_message_out_of_turn_ends_the_handshake(early):
    client, *_ = started()
    with pytest.raises(ProtocolError):
        client.receive(early)
    assert client.state is HandshakeState.FAILED


def test_a_second_ready_ends_the_handshake():
    client, server = checking()
    ready = client.accept()
    server.receive(ready)
    with pytest.raises(ProtocolError):
        server.receive(ready)


def test_what_we_may_not_do_raises_and_changes_nothing():
    handshake = Handshake(challenge(Side.CLIENT))
    for illegal in (handshake.accept, handshake.require_peer, lambda: handshake.receive(b"")):
        with pytest.raises(InvalidTransition):
            illegal()
        assert handshake.state is HandshakeState.NEW
    handshake.start()
    for illegal in (handshake.accept, handshake.start, handshake.require_peer):
        with pytest.raises(InvalidTransition):
            illegal()
        assert handshake.state is HandshakeState.AWAITING_HELLO
    client, server = checking()
    server.receive(client.accept())
    client.receive(server.accept())
    for illegal in (client.accept, client.start, lambda: client.refuse(None), lambda: client.receive(b"")):
        with pytest.raises(InvalidTransition):
            illegal()
        assert client.state is HandshakeState.DONE


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from(range(6))), max_size=5))
def test_no_order_of_messages_does_anything_but_fail_cleanly(order):
    client, _, of_client, of_server = started()
    messages = [of_client, of_server, encode(Proof(bytes(32))), encode(Ready()), encode(Close(None)), b"\xc1"]
    for step in order:
        body = step if isinstance(step, bytes) else messages[step]
        try:
            client.receive(body)
        except KvrelayError:
            assert client.state is HandshakeState.FAILED
            break
        assert client.state in (HandshakeState.AWAITING_HELLO, HandshakeState.AWAITING_PROOF)
