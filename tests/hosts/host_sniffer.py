"""What somebody can read who listens to a host's cable."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from host_network import HostNetwork, port_of

ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 16 << 20
MAX_FRAME_BYTES = 1 << 17


class Sniffer:
    """Keeps every frame, as far as the kernel's buffer goes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def heard(self) -> bytes:
        """All that passed since it was last asked."""
        frames = []
        with contextlib.suppress(BlockingIOError):
            while True:
                frames.append(self._sock.recv(MAX_FRAME_BYTES))
        return b"".join(frames)


@contextlib.contextmanager
def listening_to(network: HostNetwork, name: str) -> Iterator[Sniffer]:
    with network.switch.entered():
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        with network.switch.entered():
            sock.bind((port_of(name), ETH_P_ALL))
        sock.setblocking(False)
        yield Sniffer(sock)
