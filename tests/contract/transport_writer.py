"""A writer in a process of its own, to be stopped: sends all blocks of a ticket over and over until it is cut off."""

import contextlib
import socket
import sys

import msgspec
from transport_parts import LAYOUT, SECRET, identity

from kv_transport.digest import block_digest
from kv_transport.tcp import DATA_KIND
from kv_transport.tcp_frames import encode_frame_start
from pd_core.ticket import Ticket
from pd_rpc.blocking import authenticate_blocking_as_client

host, port, ticket_json = sys.argv[1:]
ticket = msgspec.json.decode(ticket_json, type=Ticket)
sock = socket.create_connection((host, int(port)))
authenticate_blocking_as_client(sock, SECRET, identity("prefill"), kind=DATA_KIND, deadline_s=5)
block = b"\xff" * LAYOUT.block_bytes
# No digest is right, so that the slots are written again and again.
digests = [block_digest(memoryview(block)) ^ 1] * ticket.num_blocks
start = encode_frame_start(ticket.ref, range(ticket.num_blocks), digests, LAYOUT.block_bytes)
frame = memoryview(start + block * ticket.num_blocks)
with contextlib.suppress(OSError):
    while True:
        for first in range(0, len(frame), 5000):
            sock.sendall(frame[first : first + 5000])
