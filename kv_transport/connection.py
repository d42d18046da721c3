"""One connection of a writer to a receiver, served by one thread from handshake to end. What every path shares.

handshake --> between frames <--> in a frame --> end

Nothing is allocated on the word of the peer.
"""

from __future__ import annotations

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from kv_transport.path_options import PathOptions
from kv_transport.reception import Reception
from kv_transport.sockets import limit_silence, shut_down
from pd_core.errors import KvrelayError
from pd_core.memory import BlockMemory

_log = logging.getLogger(__name__)


class WriterConnection(ABC):
    """A writer as the permit table knows it: `run` in a thread of its own, `cut` from any other.

    path:         its name
    authenticate: runs the handshake on the socket; raises KvrelayError or OSError
    """

    path: str

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        memory: BlockMemory,
        reception: Reception,
        options: PathOptions,
        authenticate: Callable[[socket.socket], object],
    ) -> None:
        self.address = address
        self._sock = sock
        self._memory = memory
        self._reception = reception
        self._options = options
        self._authenticate = authenticate
        self._lock = threading.Lock()
        self._cut_reason: str | None = None

    def cut(self, reason: str) -> None:
        """Shuts the socket down, which wakes the thread wherever it waits."""
        with self._lock:
            if self._cut_reason is None:
                self._cut_reason = reason
                shut_down(self._sock)

    def run(self) -> None:
        """Serves the connection until it ends, and closes it."""
        try:
            if self._prove():
                while self._serve_frame():
                    pass
        except (KvrelayError, OSError) as error:
            self._give_up(error)
            _log.warning("KV connection from %s closed: %s", self.address, self._cut_reason or error)
        finally:
            with self._lock:
                self._cut_reason = self._cut_reason or "closed"
                self._sock.close()
            self._let_go()

    @abstractmethod
    def _open(self) -> None:
        """What is to be done after the handshake and before the first frame. Raises KvrelayError or OSError."""

    @abstractmethod
    def _serve_frame(self) -> bool:
        """Takes one frame; False at the end of the connection. Raises KvrelayError or OSError."""

    @abstractmethod
    def _give_up(self, error: KvrelayError | OSError) -> None:
        """The connection ends with an error: the last chance to say something to the peer."""

    @abstractmethod
    def _let_go(self) -> None:
        """The socket is closed: what else belonged to the connection goes too."""

    def _prove(self) -> bool:
        try:
            self._authenticate(self._sock)
            limit_silence(self._sock, self._options.frame_silence_s)
            self._open()
        except (KvrelayError, OSError) as error:
            self._give_up(error)
            self._reception.count("kv_connections_refused", 1)
            _log.warning("KV connection from %s refused: %s", self.address, self._cut_reason or error)
            return False
        return True
