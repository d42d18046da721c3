"""The challenge: who does not know the secret, replays, reflects or tampers is not let in."""

from __future__ import annotations

import msgspec
import pytest
from rpc_cores import DECODE, ROUTER, SECRET, challenge

from pd_core.errors import AuthenticationFailed, ConfigError, InvalidTransition, ProtocolError
from pd_rpc.auth import CONTROL_KIND, NONCE_BYTES, Challenge, Side
from pd_rpc.frames import WIRE_VERSION
from pd_rpc.wire import Hello, PeerIdentity, Proof, encode


def proofs(client: Challenge, server: Challenge) -> tuple[bytes, bytes]:
    """What client and server say to each other's Hello."""
    return client.receive_hello(server.hello()), server.receive_hello(client.hello())


def test_two_peers_with_the_same_secret_learn_who_the_other_is():
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER)
    of_client, of_server = proofs(client, server)
    assert client.peer is None
    assert server.peer is None
    assert client.receive_proof(of_server) == DECODE == client.peer
    assert server.receive_proof(of_client) == ROUTER == server.peer


def test_another_secret_fails_on_both_sides():
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER, b"the secret of another cluster")
    of_client, of_server = proofs(client, server)
    with pytest.raises(AuthenticationFailed, match="decode 'decode-0'"):
        client.receive_proof(of_server)
    with pytest.raises(AuthenticationFailed, match="router 'router-0'"):
        server.receive_proof(of_client)
    assert client.peer is None
    assert server.peer is None


def test_a_proof_sent_back_to_its_maker_fails():
    client = challenge(Side.CLIENT)
    attacker = challenge(Side.SERVER, b"not the secret at all")
    own_proof = client.receive_hello(attacker.hello())
    with pytest.raises(AuthenticationFailed):
        client.receive_proof(own_proof)


def test_a_hello_sent_back_to_its_maker_fails():
    client = challenge(Side.CLIENT)
    with pytest.raises(AuthenticationFailed, match="our own Hello"):
        client.receive_hello(client.hello())


def test_a_proof_that_a_client_made_for_another_client_fails():
    """Both connect to the attacker, who wants to pass one's proof to the other."""
    first, second = challenge(Side.CLIENT), challenge(Side.CLIENT)
    of_first = first.receive_hello(second.hello())
    second.receive_hello(first.hello())
    with pytest.raises(AuthenticationFailed):
        second.receive_proof(of_first)


def test_a_recorded_conversation_cannot_be_played_again():
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER)
    recorded_hello = client.hello()
    recorded_proof, of_server = proofs(client, server)
    server.receive_proof(recorded_proof)

    server_again = challenge(Side.SERVER)
    server_again.receive_hello(recorded_hello)
    with pytest.raises(AuthenticationFailed):
        server_again.receive_proof(recorded_proof)
    client_again = challenge(Side.CLIENT)
    client_again.receive_hello(server.hello())
    with pytest.raises(AuthenticationFailed):
        client_again.receive_proof(of_server)


@pytest.mark.parametrize(
    "changed",
    [
        {"identity": PeerIdentity("router-1", "router", "a1")},
        {"identity": PeerIdentity("router-0", "store", "a1")},
        {"identity": PeerIdentity("router-0", "router", "a2")},
        {"nonce": bytes(NONCE_BYTES)},
    ],
)
def test_a_hello_that_was_changed_on_its_way_fails_on_both_sides(changed):
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER)
    hello = msgspec.msgpack.decode(client.hello(), type=Hello)
    of_server = server.receive_hello(encode(msgspec.structs.replace(hello, **changed)))
    of_client = client.receive_hello(server.hello())
    with pytest.raises(AuthenticationFailed):
        server.receive_proof(of_client)
    with pytest.raises(AuthenticationFailed):
        client.receive_proof(of_server)


def test_the_same_hello_in_other_bytes_fails_too():
    """What counts are the bytes, so no second encoding of an identity can slip through."""
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER)
    version, rest = b"\x94\xa5hello\x02", client.hello().removeprefix(b"\x94\xa5hello\x02")
    assert version + rest == client.hello()
    server.receive_hello(b"\x94\xa5hello\xcc\x02" + rest)
    with pytest.raises(AuthenticationFailed):
        server.receive_proof(client.receive_hello(server.hello()))


def test_a_proof_for_one_kind_of_connection_is_wrong_for_another():
    client, server = challenge(Side.CLIENT, kind="kvrelay data"), challenge(Side.SERVER)
    of_client, of_server = proofs(client, server)
    with pytest.raises(AuthenticationFailed, match="kvrelay data"):
        client.receive_proof(of_server)
    with pytest.raises(AuthenticationFailed, match="kvrelay control"):
        server.receive_proof(of_client)


@pytest.mark.parametrize("mac", [b"", bytes(31), bytes(32), bytes(33)])
def test_a_proof_of_any_other_bytes_fails(mac):
    client = challenge(Side.CLIENT)
    client.receive_hello(challenge(Side.SERVER).hello())
    with pytest.raises(AuthenticationFailed):
        client.receive_proof(encode(Proof(mac)))


def test_messages_out_of_turn_are_errors_of_the_peer():
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER)
    with pytest.raises(ProtocolError, match="before Hello"):
        client.receive_proof(encode(Proof(bytes(32))))
    with pytest.raises(ProtocolError, match="before Hello"):
        client.receive_hello(encode(Proof(bytes(32))))
    client.receive_hello(server.hello())
    with pytest.raises(ProtocolError, match="second Hello"):
        client.receive_hello(server.hello())
    with pytest.raises(ProtocolError, match="instead of Proof"):
        client.receive_proof(server.hello())


def test_nobody_proves_himself_twice():
    client, server = challenge(Side.CLIENT), challenge(Side.SERVER)
    _, of_server = proofs(client, server)
    client.receive_proof(of_server)
    with pytest.raises(InvalidTransition):
        client.receive_proof(of_server)


def test_another_version_inside_hello_is_refused_naming_both():
    hello = encode(Hello(7, DECODE, bytes(range(NONCE_BYTES))))
    with pytest.raises(ProtocolError, match=f"ours {WIRE_VERSION}, theirs 7"):
        challenge(Side.CLIENT).receive_hello(hello)


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines", "\x1b[31m"])
def test_a_name_that_would_spoil_a_log_is_refused(name):
    for identity in (PeerIdentity(name, "r", "i"), PeerIdentity("n", name, "i"), PeerIdentity("n", "r", name)):
        with pytest.raises(ProtocolError, match="not printable"):
            challenge(Side.CLIENT).receive_hello(encode(Hello(WIRE_VERSION, identity, bytes(range(NONCE_BYTES)))))


@pytest.mark.parametrize("num_bytes", [0, NONCE_BYTES - 1, NONCE_BYTES + 1])
def test_a_nonce_of_another_length_is_refused(num_bytes):
    with pytest.raises(ProtocolError, match="nonce"):
        challenge(Side.CLIENT).receive_hello(encode(Hello(WIRE_VERSION, DECODE, bytes(num_bytes))))
    with pytest.raises(ValueError, match="nonce"):
        Challenge(Side.CLIENT, SECRET, ROUTER, bytes(num_bytes), kind=CONTROL_KIND)


def test_a_secret_that_protects_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 16"):
        challenge(Side.CLIENT, b"too short")
