"""A writer's connection on which doorbells come: over shared memory, and over UCX.

handshake --> attach --> attached --> doorbell --> ... --> taken --> doorbell ... --> refused, when something is wrong
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Callable

from kv_transport.body_reader import BodyReader
from kv_transport.connection import WriterConnection
from kv_transport.doorbell_frames import MAX_BODY_BYTES, MAX_REASON_CHARS, Attached, Refused, encode
from kv_transport.path_options import PathOptions
from kv_transport.reception import Reception
from kv_transport.sockets import limit_send
from pd_core.errors import KvrelayError
from pd_core.memory import BlockMemory


class DoorbellConnection(WriterConnection):
    """Says "attached" to who has proved itself, and at the end why it goes. See WriterConnection."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        memory: BlockMemory,
        reception: Reception,
        options: PathOptions,
        authenticate: Callable[[socket.socket], object],
    ) -> None:
        super().__init__(sock, address, memory, reception, options, authenticate)
        self._bodies = BodyReader(sock, MAX_BODY_BYTES, options.frame_silence_s)
        self._last_number = 0
        self._is_proved = False

    @abstractmethod
    def _attach(self) -> None:
        """Reads the attach and makes what it shows work. Raises KvrelayError or OSError."""

    def _open(self) -> None:
        self._is_proved = True
        limit_send(self._sock, self._options.frame_silence_s)
        self._attach()
        self._sock.sendall(encode(Attached()))

    def _next_body(self, idle_s: float) -> bytes | None:
        """See BodyReader.next_body; over when the connection is cut."""
        return self._bodies.next_body(idle_s, lambda: self._cut_reason is not None)

    def _give_up(self, error: KvrelayError | OSError) -> None:
        if not self._is_proved or self._cut_reason is not None:
            return
        reason = error.message if isinstance(error, KvrelayError) else str(error)
        try:
            self._sock.send(encode(Refused(reason[:MAX_REASON_CHARS])), socket.MSG_DONTWAIT)
        except OSError:
            return  # it reads nothing: it need not know
