"""What a receiver says to doorbells, read by the sender from its blocking socket."""

from __future__ import annotations

import socket
from typing import Generic

import msgspec

from kv_transport.doorbell_frames import MAX_BODY_BYTES, M, Refused, decode
from pd_core.errors import ProtocolError, TransferError
from pd_rpc.frames import FrameReader

RECEIVE_BYTES = 4096


class AnswerReader(Generic[M]):
    """Of one connection.

    decoder:   of all that the receiver may say
    silence_s: the socket's limit (sockets.limit_silence), for the error that names it
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], silence_s: float) -> None:
        self._decoder = decoder
        self._silence_s = silence_s
        self._frames = FrameReader(MAX_BODY_BYTES)

    def next_answer(self, sock: socket.socket) -> M:
        """Blocks until a whole one is there, which is never a Refused.

        Raises TransferError with the receiver's reason when it refuses, and for one that is silent or cannot be
        understood; OSError when it is gone.
        """
        try:
            while (body := self._frames.next_body()) is None:
                data = sock.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectionError("closed by the receiver")
                self._frames.feed(data)
            answer = decode(self._decoder, body)
        except BlockingIOError as error:
            raise TransferError(f"silent for {self._silence_s:g} s") from error
        except ProtocolError as error:
            raise TransferError(error.message) from error
        if isinstance(answer, Refused):
            raise TransferError(f"the receiver objects: {answer.reason}")
        return answer
