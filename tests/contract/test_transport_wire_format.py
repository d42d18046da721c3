"""Connections for KV as another implementation sees them: plain msgpack, struct, zlib, hmac and xxhash, and no more.

See docs/wire-format.md. Both sides of every kind: a foreign writer that our receiver takes blocks from, and a foreign
receiver that our sender gives them to. What our side says is recorded, and changes only together with a version.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import mmap
import os
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import msgspec
import pytest
import xxhash
from transport_parts import FINGERPRINT, LAYOUT, SECRET, Pair
from transport_paths import shm_pair, tcp_pair
from waiting import until

from pd_core.ticket import Ticket, TransportAddress

CONTROL_VERSION, DATA_VERSION, SHM_VERSION = 2, 1, 1
CONTROL = struct.Struct(">4sHII")
DATA = struct.Struct(">4sHIII")
LABEL = struct.Struct("<8s16sQQ")
PAGE = 4096
IDENTITY = {
    "name": "other",
    "role": "prefill",
    "incarnation": "boot",
    "fingerprint": msgspec.to_builtins(FINGERPRINT),
}


class Foreigner:
    """One side of a connection, as small as another implementation can be."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(5.0)

    def exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self.sock.recv(num_bytes - len(data))
            assert piece, "the other side has hung up"
            data += piece
        return data

    def receive(self) -> tuple[bytes, Any]:
        """The next body of a control frame, raw and decoded."""
        magic, version, length, crc = CONTROL.unpack(self.exactly(CONTROL.size))
        body = self.exactly(length)
        assert (magic, version, zlib.crc32(body)) == (b"KVRP", CONTROL_VERSION, crc)
        return body, msgpack.unpackb(body)

    def frame(self, message: Any) -> bytes:
        body: bytes = msgpack.packb(message)
        return CONTROL.pack(b"KVRP", CONTROL_VERSION, len(body), zlib.crc32(body)) + body

    def send(self, message: Any, files: list[int] | None = None) -> None:
        if files:
            socket.send_fds(self.sock, [self.frame(message)], files)
        else:
            self.sock.sendall(self.frame(message))

    def prove(self, kind: bytes, role: bytes) -> Any:
        """The handshake; who the other side says it is."""
        ours = ["hello", CONTROL_VERSION, IDENTITY, os.urandom(32)]
        self.send(ours)
        theirs_body, theirs = self.receive()
        hellos = [msgpack.packb(ours), theirs_body] if role == b"client" else [theirs_body, msgpack.packb(ours)]
        self.send(["proof", _mac(kind, role, hellos)])
        other = b"server" if role == b"client" else b"client"
        assert self.receive()[1] == ["proof", _mac(kind, other, hellos)]
        self.send(["ready"])
        assert self.receive()[1] == ["ready"]
        return theirs[2]


def _mac(kind: bytes, role: bytes, hellos: list[bytes]) -> bytes:
    transcript = kind + b"\0" + role + b"\0"
    for hello in hellos:
        transcript += struct.pack(">I", len(hello)) + hello
    return hmac.new(SECRET, transcript, hashlib.sha256).digest()


def ref_of(ticket: Ticket) -> dict[str, Any]:
    ref = ticket.ref
    return {"ticket_id": ref.ticket_id, "incarnation": ref.incarnation, "epoch": ref.epoch, "attempt": ref.attempt}


def data_frame(header: dict[str, Any], blocks: list[bytes]) -> bytes:
    packed = msgpack.packb(header)
    payload = b"".join(blocks)
    return DATA.pack(b"KVRB", DATA_VERSION, len(packed), len(payload), zlib.crc32(packed)) + packed + payload


def digests_of(blocks: list[bytes]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(block) for block in blocks]


def pool_file(blocks: list[bytes], nonce: bytes) -> int:
    """A sealed memfd, as the document draws it."""
    body = b"".join(blocks)
    size = -(-len(body) // PAGE) * PAGE
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.write(fd, body + bytes(size - len(body)) + LABEL.pack(b"KVRPOOL1", nonce, len(blocks), len(blocks[0])))
    os.ftruncate(fd, size + PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


BLOCKS = [bytes([number]) * LAYOUT.block_bytes for number in range(1, 4)]
NONCE = bytes(range(16))


@pytest.mark.parametrize("with_digests", [True, False])
async def test_our_tcp_receiver_takes_blocks_from_a_writer_made_from_the_document(with_digests: bool) -> None:
    async with tcp_pair(4) as pair:
        ticket, arrivals = pair.open([3, 0, 2], with_digests=with_digests)

        def write() -> None:
            with socket.create_connection((ticket.addresses[0].host, ticket.addresses[0].port)) as sock:
                foreigner = Foreigner(sock)
                assert foreigner.prove(b"kvrelay kv data", b"client")["name"] == "decode-0"
                for indices in ([2, 0], [1]):
                    blocks = [BLOCKS[index] for index in indices]
                    digests = digests_of(blocks) if with_digests else []
                    header = {"ref": ref_of(ticket), "indices": indices, "digests": digests, "later": [None]}
                    sock.sendall(data_frame(header, blocks))

        await asyncio.to_thread(write)
        await arrivals.until(lambda a: a.verified == {0, 1, 2})
        assert pair.received(ticket) == BLOCKS


@pytest.mark.parametrize("with_digests", [True, False])
async def test_our_shm_receiver_takes_blocks_from_a_writer_made_from_the_document(with_digests: bool) -> None:
    async with shm_pair(4) as pair:
        ticket, arrivals = pair.open([3, 0, 2], with_digests=with_digests)
        digests = digests_of(BLOCKS) if with_digests else [0, 0, 0]

        def write() -> list[Any]:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\0" + ticket.addresses[0].host.removeprefix("@"))
                foreigner = Foreigner(sock)
                foreigner.prove(b"kvrelay kv shm", b"client")
                fd = pool_file(BLOCKS, NONCE)
                size = {"num_blocks": 3, "block_bytes": LAYOUT.block_bytes}
                foreigner.send({"type": "attach", "version": SHM_VERSION, **size, "nonce": NONCE}, [fd])
                os.close(fd)
                said = [foreigner.receive()[1]]
                for number, indices in ((4, [2, 0]), (5, [1])):
                    named = {"indices": indices, "block_ids": indices}
                    compared = {"digests": [digests[index] for index in indices] if with_digests else []}
                    bell = {"type": "doorbell", "number": number, "ref": ref_of(ticket), **named, **compared, "new": 1}
                    foreigner.send(bell)
                    said.append(foreigner.receive()[1])
                foreigner.send({"type": "doorbell", "number": 1})
                said.append(foreigner.receive()[1])
                return said

        *said, refused = await asyncio.to_thread(write)
        assert said == [{"type": "attached"}, {"type": "taken", "number": 4}, {"type": "taken", "number": 5}]
        assert refused["type"] == "refused"
        assert "ref" in refused["reason"]
        await arrivals.until(lambda a: a.verified == {0, 1, 2})
        assert pair.received(ticket) == BLOCKS


@contextlib.contextmanager
def foreign_receiver(listener: socket.socket, serve: Callable[[Foreigner], None]) -> Iterator[None]:
    """Serves one writer in a thread; what went wrong there is raised at the end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            sock, _ = listener.accept()
            with sock:
                serve(Foreigner(sock))
        except BaseException as error:  # raised below, where pytest looks
            failures.append(error)

    thread = threading.Thread(target=run, name="foreign-receiver")
    thread.start()
    try:
        yield
    finally:
        thread.join(10.0)
    assert not failures, failures


def there(pair: Pair, ticket: Ticket, address: TransportAddress) -> Ticket:
    return msgspec.structs.replace(ticket, addresses=[address])


async def test_our_tcp_sender_says_what_the_document_says() -> None:
    async with tcp_pair(6) as pair:
        heard: list[Any] = []

        def serve(foreigner: Foreigner) -> None:
            heard.append(foreigner.prove(b"kvrelay kv data", b"server")["name"])
            for _ in range(3):
                magic, version, num_header_bytes, num_bytes, crc = DATA.unpack(foreigner.exactly(DATA.size))
                packed = foreigner.exactly(num_header_bytes)
                assert (magic, version, zlib.crc32(packed)) == (b"KVRB", DATA_VERSION, crc)
                header = msgpack.unpackb(packed)
                payload = foreigner.exactly(num_bytes)
                size = LAYOUT.block_bytes
                blocks = [payload[first : first + size] for first in range(0, num_bytes, size)]
                assert header.pop("digests") in ([], digests_of(blocks))
                heard.append((header, blocks))

        with socket.create_server(("127.0.0.1", 0)) as listener, foreign_receiver(listener, serve):
            address = TransportAddress("tcp", *listener.getsockname())
            ticket = there(pair, pair.ticket([0, 1, 2, 3]), address)
            await pair.push(ticket, [3, 0, 1, 2], [5, 1, 2, 4])
            without = msgspec.structs.replace(ticket, with_digests=False)
            await pair.push(without, [1], [2])
            await until(lambda: len(heard) == 4)
        sent = pair.sent(list(range(6)))
        assert heard == [
            "prefill-0",
            ({"ref": ref_of(ticket), "indices": [3, 0, 1]}, [sent[5], sent[1], sent[2]]),
            ({"ref": ref_of(ticket), "indices": [2]}, [sent[4]]),
            ({"ref": ref_of(ticket), "indices": [1]}, [sent[2]]),
        ]


async def test_our_shm_sender_says_what_the_document_says() -> None:
    async with shm_pair(6) as pair:
        heard: list[Any] = []

        def serve(foreigner: Foreigner) -> None:
            heard.append(foreigner.prove(b"kvrelay kv shm", b"server")["name"])
            head, files, _, _ = socket.recv_fds(foreigner.sock, CONTROL.size, 1)
            body = foreigner.exactly(CONTROL.unpack(head)[2])
            attach = msgpack.unpackb(body)
            size = os.fstat(files[0]).st_size
            with mmap.mmap(files[0], size, prot=mmap.PROT_READ) as pool:
                os.close(files[0])
                block_bytes = attach["block_bytes"]
                label = LABEL.unpack_from(pool, size - PAGE)
                assert label == (b"KVRPOOL1", attach["nonce"], attach["num_blocks"], block_bytes)
                heard.append({key: value for key, value in attach.items() if key != "nonce"})
                foreigner.send({"type": "attached", "new": 1})
                for _ in range(3):
                    bell = foreigner.receive()[1]
                    places = bell.pop("block_ids")
                    blocks = [pool[place * block_bytes : (place + 1) * block_bytes] for place in places]
                    assert bell.pop("digests") in ([], digests_of(blocks))
                    heard.append((bell, blocks))
                    foreigner.send({"type": "taken", "number": bell["number"]})

        name = f"foreign-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen()
            with foreign_receiver(listener, serve):
                ticket = there(pair, pair.ticket([0, 1, 2, 3]), TransportAddress("shm", f"@{name}", 0))
                await pair.push(ticket, [3, 0, 1, 2], [5, 1, 2, 4])
                await pair.push(msgspec.structs.replace(ticket, with_digests=False), [1], [2])
        sent = pair.sent(list(range(6)))
        common = {"type": "doorbell", "ref": ref_of(ticket)}
        assert heard == [
            "prefill-0",
            {"type": "attach", "version": SHM_VERSION, "num_blocks": 6, "block_bytes": LAYOUT.block_bytes},
            (common | {"number": 1, "indices": [3, 0, 1]}, [sent[5], sent[1], sent[2]]),
            (common | {"number": 2, "indices": [2]}, [sent[4]]),
            (common | {"number": 3, "indices": [1]}, [sent[2]]),
        ]


async def test_a_reason_that_a_foreign_receiver_gives_is_what_the_push_fails_with() -> None:
    async with shm_pair(2) as pair:
        name = f"foreign-{os.getpid()}"

        def serve(foreigner: Foreigner) -> None:
            foreigner.prove(b"kvrelay kv shm", b"server")
            _, files, _, _ = socket.recv_fds(foreigner.sock, 4096, 1)
            os.close(files[0])
            foreigner.send({"type": "refused", "reason": "not today"})

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen()
            with foreign_receiver(listener, serve):
                ticket = there(pair, pair.ticket([0]), TransportAddress("shm", f"@{name}", 0))
                with pytest.raises(Exception, match="the receiver objects: not today"):
                    await pair.push(ticket, [0], [1])
