"""The wire format as another implementation sees it: plain msgpack, struct, zlib and hmac, nothing of pd_rpc.

See docs/wire-format.md. The recorded bytes change only together with WIRE_VERSION.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct
import zlib

import msgpack
from rpc_peers import DECODE, SECRET, Handlers

from pd_core.errors import Overloaded
from pd_core.layout import BlockLayout, Fingerprint
from pd_rpc.auth import CONTROL_KIND, Challenge, Side
from pd_rpc.connection import ConnectionState, PeerProved
from pd_rpc.limits import DEFAULT_LIMITS
from pd_rpc.server_core import CallCancelled, CallReceived, CreditGranted, ServerConnection
from pd_rpc.wire import PeerIdentity

HEADER = struct.Struct(">4sHII")

# fmt: off
RECORDED = [  # who sent it, the bytes in hex
    ("client",
     "4b56525000020000006127852a4294a568656c6c6f0284a46e616d65a8726f757465722d30a4726f6c65a6726f757465"
     "72ab696e6361726e6174696f6ea26131ab66696e6765727072696e74c0c420000102030405060708090a0b0c0d0e0f10"
     "1112131415161718191a1b1c1d1e1f"),
    ("server",
     "4b5652500002000000d66d6408dd94a568656c6c6f0284a46e616d65a86465636f64652d30a4726f6c65a66465636f64"
     "65ab696e6361726e6174696f6ea26232ab66696e6765727072696e7485a777656967687473a27731a873657474696e67"
     "73a27331a9746f6b656e697a6572a27431a86e756d6572696373a26e31a66c61796f757485a46e616d65a5706c61696e"
     "aa6e756d5f6c617965727302ac6e756d5f6b765f686561647301a8686561645f64696d08a56474797065a7666c6f6174"
     "3332c420202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f4b5652500002000000296910"
     "4a8f92a570726f6f66c4207a7a9058e3a533561b6e5441225f4013eddfc39ad6eb0d39e62240c879f65310"),
    ("client",
     "4b565250000200000029d5f6974f92a570726f6f66c42005aa522bef67deb70da0766084047231b181938beb7cffc54b"
     "10f97a4a0ee0444b56525000020000000773b5501991a57265616479"),
    ("server",
     "4b56525000020000000773b5501991a57265616479"),
    ("client",
     "4b565250000200000024ff1b9b4495a463616c6c01cb40040000000000000282a474797065a361736ba474657874a377"
     "68794b56525000020000002446289ed895a463616c6c02cb3ff00000000000004082a474797065a361736ba474657874"
     "a377686f"),
    ("server",
     "4b56525000020000004addb568fa93a56974656d73930102019382a474797065a6616e73776572a5696e6465780782a4"
     "74797065a6616e73776572a5696e646578cd012c82a474797065a6616e73776572a5696e646578084b56525000020000"
     "0006eecc8c8392a3656e64014b565250000200000045a204715f93a66661696c65640284a46b696e64aa4f7665726c6f"
     "61646564a76d657373616765a466756c6ca5706172616dc0ad72657472795f61667465725f73cb3ff8000000000000"),
    ("client",
     "4b565250000200000022b7db862395a463616c6c03cb3ff00000000000000182a474797065a361736ba474657874a178"
     "4b56525000020000000a4a2582ca93a663726564697403204b5652500002000000090672f78192a663616e63656c034b"
     "565250000200000006e6cebff291a470696e67"),
    ("server",
     "4b56525000020000000879aa1b9a92a5636c6f7365c0"),
]
# fmt: on

FINGERPRINT = {
    "weights": "w1",
    "settings": "s1",
    "tokenizer": "t1",
    "numerics": "n1",
    "layout": {"name": "plain", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32"},
}
CLIENT_IDENTITY = {"name": "router-0", "role": "router", "incarnation": "a1", "fingerprint": None}
SERVER_IDENTITY = {"name": "decode-0", "role": "decode", "incarnation": "b2", "fingerprint": FINGERPRINT}
OVERLOADED = {"kind": "Overloaded", "message": "full", "param": None, "retry_after_s": 1.5}
CLIENT_NONCE, SERVER_NONCE = bytes(range(32)), bytes(range(32, 64))


def frame(message) -> bytes:
    body = msgpack.packb(message)
    return HEADER.pack(b"KVRP", 2, len(body), zlib.crc32(body)) + body


def split(data: bytes) -> list[bytes]:
    """The bodies of whole frames."""
    bodies = []
    while data:
        magic, version, length, crc = HEADER.unpack_from(data)
        body, data = data[14 : 14 + length], data[14 + length :]
        assert (magic, version, len(body), zlib.crc32(body)) == (b"KVRP", 2, length, crc)
        bodies.append(body)
    return bodies


def mac(prover: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    transcript = b"kvrelay control\0" + prover + b"\0"
    for hello in (client_hello, server_hello):
        transcript += struct.pack(">I", len(hello)) + hello
    return hmac.new(SECRET, transcript, hashlib.sha256).digest()


def test_recorded_frames_are_what_the_document_says():
    bodies = [(who, body) for who, data in RECORDED for body in split(bytes.fromhex(data))]
    client_hello, server_hello = bodies[0][1], bodies[1][1]
    assert [(who, msgpack.unpackb(body)) for who, body in bodies] == [
        ("client", ["hello", 2, CLIENT_IDENTITY, CLIENT_NONCE]),
        ("server", ["hello", 2, SERVER_IDENTITY, SERVER_NONCE]),
        ("server", ["proof", mac(b"server", client_hello, server_hello)]),
        ("client", ["proof", mac(b"client", client_hello, server_hello)]),
        ("client", ["ready"]),
        ("server", ["ready"]),
        ("client", ["call", 1, 2.5, 2, {"type": "ask", "text": "why"}]),
        ("client", ["call", 2, 1.0, 64, {"type": "ask", "text": "who"}]),
        ("server", ["items", [1, 2, 1], [{"type": "answer", "index": index} for index in (7, 300, 8)]]),
        ("server", ["end", 1]),
        ("server", ["failed", 2, OVERLOADED]),
        ("client", ["call", 3, 1.0, 1, {"type": "ask", "text": "x"}]),
        ("client", ["credit", 3, 32]),
        ("client", ["cancel", 3]),
        ("client", ["ping"]),
        ("server", ["close", None]),
    ]


def test_our_server_answers_recorded_bytes_with_recorded_bytes():
    layout = BlockLayout("plain", 2, 1, 8, "float32")
    identity = PeerIdentity("decode-0", "decode", "b2", Fingerprint("w1", "s1", "t1", "n1", layout))
    challenge = Challenge(Side.SERVER, SECRET, identity, SERVER_NONCE, kind=CONTROL_KIND)
    server = ServerConnection(challenge, DEFAULT_LIMITS, now_s=0.0)
    server.start()
    events = []
    for who, data in RECORDED:
        if who == "server":
            assert server.data_to_send(0.0).hex() == data
            continue
        for event in server.receive(bytes.fromhex(data), 0.0):
            events.append(event)
            if isinstance(event, PeerProved):
                server.accept()
        calls = [event.call_id for event in events if isinstance(event, CallReceived)]
        if calls == [1, 2]:
            for call_id, index in ((1, 7), (2, 300), (1, 8)):
                server.send_item(call_id, {"type": "answer", "index": index})
            server.end(1)
            server.fail(2, Overloaded("full", retry_after_s=1.5))
        if calls == [1, 2, 3]:
            assert events[-2:] == [CreditGranted(3), CallCancelled(3)]
            server.close(None)
    assert server.state is ConnectionState.CLOSED


class ForeignClient:
    """As small as another implementation can be."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._sock = socket.create_connection(address, timeout=5.0)

    def receive(self) -> tuple[bytes, list]:
        """The next body, raw and decoded, that is no Ping."""
        while True:
            _, _, length, crc = HEADER.unpack(self._exactly(HEADER.size))
            body = self._exactly(length)
            assert zlib.crc32(body) == crc
            if (message := msgpack.unpackb(body)) != ["ping"]:
                return body, message

    def receive_items(self, num_items: int) -> list[tuple[int, dict]]:
        """Call and body of the next items, in as many frames as they come in."""
        items: list[tuple[int, dict]] = []
        while len(items) < num_items:
            _, (tag, call_ids, bodies) = self.receive()
            assert tag == "items"
            items += zip(call_ids, bodies, strict=True)
        return items

    def send(self, message) -> None:
        self._sock.sendall(frame(message))

    def authenticate(self) -> dict:
        identity = {"name": "other", "role": "store", "incarnation": "z", "fingerprint": None}
        ours = ["hello", 2, identity, os.urandom(32)]
        self.send(ours)
        our_body, (their_body, theirs) = msgpack.packb(ours), self.receive()
        self.send(["proof", mac(b"client", our_body, their_body)])
        assert self.receive()[1] == ["proof", mac(b"server", our_body, their_body)]
        self.send(["ready"])
        assert self.receive()[1] == ["ready"]
        return theirs[2]

    def close(self) -> None:
        self._sock.close()

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self._sock.recv(num_bytes - len(data))
            assert piece
            data += piece
        return data


async def test_a_client_written_from_the_document_alone_can_call(peers):
    _, address = await peers.server(Handlers())

    def talk():
        client = ForeignClient(address)
        assert client.authenticate()["name"] == DECODE.name
        client.send(["call", 1, 5.0, 2, {"type": "count", "num_items": 3}])
        items = client.receive_items(2)
        client.send(["credit", 1, 1])
        items += client.receive_items(1)
        answers = [client.receive()[1]]
        client.send(["call", 7, 5.0, 1, {"type": "hang"}])
        client.send(["cancel", 7])
        answers.append(client.receive()[1])
        client.send(["close", None])
        client.close()
        return items, answers

    items, (end, failed) = await asyncio.to_thread(talk)
    assert items == [(1, {"type": "number", "index": index, "filling": b""}) for index in range(3)]
    assert end == ["end", 1]
    assert (failed[:2], failed[2]["kind"]) == (["failed", 7], "Cancelled")
