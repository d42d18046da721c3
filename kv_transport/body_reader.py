"""Bodies of frames from a blocking socket whose receives time out (`sockets.limit_silence`)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from pd_core.errors import TransferError
from pd_rpc.frames import FrameReader

RECEIVE_BYTES = 64 * 1024


class BodyReader:
    """silence_s: the socket's, and the longest that one frame may take, however slowly it drips"""

    def __init__(self, sock: socket.socket, max_body_bytes: int, silence_s: float) -> None:
        self._sock = sock
        self._silence_s = silence_s
        self._frames = FrameReader(max_body_bytes)

    def feed(self, data: bytes) -> None:
        """Bytes that have been received otherwise, in front of what the socket has. Raises ProtocolError."""
        self._frames.feed(data)

    def next_body(self, idle_s: float, is_over: Callable[[], bool]) -> bytes | None:
        """None when the peer has ended the connection before a frame's first byte, is idle too long, or `is_over`.

        Raises ProtocolError, OSError, TransferError for a frame that is not whole in time.
        """
        idle_ends_s, frame_ends_s = time.monotonic() + idle_s, time.monotonic() + self._silence_s
        while (body := self._frames.next_body()) is None:
            is_inside = self._frames.is_inside_frame
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                data = None
            now_s = time.monotonic()
            if is_inside and (not data or now_s >= frame_ends_s):
                late = f"it was not whole within {self._silence_s:g} s"
                raise TransferError(f"the connection ended in a frame, or {late}")
            if data:
                frame_ends_s = frame_ends_s if is_inside else now_s + self._silence_s
                self._frames.feed(data)
            elif data is not None or is_over() or now_s >= idle_ends_s:
                return None
        return body
