"""TLS of one connection, without a socket: bytes of the network on one side, bytes of ours on the other.

       feed -->  ......  --> read, read_into
    network      TLS 1.3      ours
take_outgoing <-- ......  <-- write

Both kinds of connections have it between the socket and what they are: control connections in asyncio
(pd_rpc.tls_protocol), data connections in blocking threads (pd_rpc.tls_socket). Not by Python's SSLSocket: shutting one
down from another thread makes it hand out undeciphered bytes.
"""

from __future__ import annotations

import ssl
from typing import cast

from pd_core.errors import AuthenticationFailed, KvrelayError, ProtocolError
from pd_rpc.frames import encode_frame
from pd_rpc.wire import Close, encode, error_info

MAX_BYTES = 256 << 30
"""What one connection carries, either way, before it should be replaced: for more full records than 2^24.5, RFC 8446
gives AES-GCM no more promise, and OpenSSL does not change keys by itself."""

_RECORD_TYPES = frozenset({0x14, 0x15, 0x16, 0x17})
_READ_BYTES = 16 * 1024
_ABOUT_CERTIFICATES = frozenset(
    {
        "UNKNOWN_CA",
        "BAD_CERTIFICATE",
        "CERTIFICATE_EXPIRED",
        "CERTIFICATE_REVOKED",
        "CERTIFICATE_UNKNOWN",
        "CERTIFICATE_REQUIRED",
        "UNSUPPORTED_CERTIFICATE",
    }
)


class TlsSession:
    """One side. Every method raises AuthenticationFailed (a certificate) or ProtocolError (no TLS) when it is over;
    what then lies in `take_outgoing` tells the peer why, in its own language."""

    def __init__(self, context: ssl.SSLContext, is_server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._piece = memoryview(bytearray(_READ_BYTES))
        self._has_begun = False
        self._num_bytes = 0
        self.is_open = False
        """Whether both have agreed on keys. The server may still refuse the client's certificate."""
        self.is_ended = False
        """Whether the peer has said that nothing will come any more."""

    @property
    def is_worn(self) -> bool:
        """Whether it has carried as much as one set of keys should."""
        return self._num_bytes >= MAX_BYTES

    def start(self) -> None:
        """The client begins."""
        self._advance()

    def feed(self, data: bytes | memoryview) -> None:
        """Takes bytes of the network as they came."""
        if not self._has_begun and data:
            self._has_begun = True
            self._check_first(data[0])
        self._incoming.write(data)
        if not self.is_open:
            self._advance()

    def read_into(self, view: memoryview) -> int:
        """Fills a part of the view; 0 when that takes more bytes of the network, or the peer has ended."""
        if not self.is_open or self.is_ended:
            return 0
        try:
            num_bytes = cast(int, self._object.read(len(view), view))  # bytes only without a place for them
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError:
            self.is_ended = True
            return 0
        except ssl.SSLError as error:
            raise _explained(error) from error
        self._num_bytes += num_bytes
        return num_bytes

    def read(self) -> bytes:
        """All that can be read now."""
        pieces: list[bytes] = []
        while num_bytes := self.read_into(self._piece):
            pieces.append(bytes(self._piece[:num_bytes]))
        return b"".join(pieces)

    def write(self, data: bytes | memoryview) -> None:
        """Enciphers all of it, once the session is open."""
        self._num_bytes += len(data)
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._object.write(rest) :]
            except ssl.SSLError as error:
                raise _explained(error) from error

    def take_outgoing(self) -> bytes:
        """What is to be sent now."""
        return self._outgoing.read()

    def _advance(self) -> None:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise _explained(error) from error
        self.is_open = True

    def _check_first(self, byte: int) -> None:
        """A peer of ours without TLS is told so in the frame that it understands."""
        if byte in _RECORD_TYPES:
            return
        self._outgoing.read()
        told = ProtocolError("the other side speaks TLS alone: `tls` of the config has to be set here too")
        self._outgoing.write(encode_frame(encode(Close(error_info(told)))))
        raise ProtocolError("it does not speak TLS, which `tls` of our config demands")


def _explained(error: ssl.SSLError) -> KvrelayError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(f"its certificate is not accepted: {error.verify_message}")
    reason = error.reason or ""
    _, is_alert, alert = reason.partition("ALERT_")
    if is_alert and alert in _ABOUT_CERTIFICATES:
        return AuthenticationFailed(f"it does not accept our certificate: {_words(alert)}")
    if is_alert:
        return ProtocolError(f"it ended TLS: {_words(alert)}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationFailed("it showed no certificate")
    return ProtocolError(f"TLS: {_words(reason) or error}")


def _words(name: str) -> str:
    return name.replace("_", " ").lower()
