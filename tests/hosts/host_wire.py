"""A wire that is slow and loses frames: passes Ethernet frames between two interfaces.

    python host_wire.py INTERFACE INTERFACE DELAY_S LOSS SEED

For kernels without netem. Each frame is late by DELAY_S in either direction, and lost with the probability LOSS. The
same seed loses the same frames of the same traffic. Runs until killed; says "ready" when frames pass.
"""

from __future__ import annotations

import random
import selectors
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
"""A header before each frame that says what the kernel has left to the network card: checksums, segmentation."""
PACKET_IGNORE_OUTGOING = 23
MAX_FRAME_BYTES = 1 << 17
MAX_QUEUED_FRAMES = 4096
"""In each direction; more are lost, as on any switch."""
SO_RCVBUFFORCE = 33
RECEIVE_BUFFER_BYTES = 8 << 20


class Direction:
    """What comes in at `source` leaves at `target`."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, loss: float, seed: str) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(seed)
        self._queue: deque[tuple[float, bytes]] = deque()

    @property
    def next_s(self) -> float:
        """When the next frame is due."""
        return self._queue[0][0] if self._queue else float("inf")

    def take(self, now_s: float) -> None:
        """All frames that are there."""
        while True:
            try:
                frame = self.source.recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            if self._random.random() >= self._loss and len(self._queue) < MAX_QUEUED_FRAMES:
                self._queue.append((now_s + self._delay_s, frame))

    def pass_on(self, now_s: float) -> None:
        """What is due. A far end that is down or full loses it."""
        while self.next_s <= now_s:
            _, frame = self._queue.popleft()
            try:
                self._target.send(frame)
            except OSError:
                continue


def tap(interface: str) -> socket.socket:
    """Reads and writes the interface's frames. Raises OSError."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    sock.bind((interface, ETH_P_ALL))
    sock.setblocking(False)
    return sock


def main() -> None:
    near, far = tap(sys.argv[1]), tap(sys.argv[2])
    delay_s, loss, seed = float(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    directions = [
        Direction(near, far, delay_s, loss, f"{seed} out"),
        Direction(far, near, delay_s, loss, f"{seed} in"),
    ]
    selector = selectors.DefaultSelector()
    for direction in directions:
        selector.register(direction.source, selectors.EVENT_READ, direction)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        due_s = min(direction.next_s for direction in directions)
        wait_s = None if due_s == float("inf") else max(0.0, due_s - time.monotonic())
        ready = selector.select(wait_s)
        now_s = time.monotonic()
        for key, _ in ready:
            key.data.take(now_s)
        for direction in directions:
            direction.pass_on(now_s)


if __name__ == "__main__":
    main()
