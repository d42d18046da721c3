"""Both sides prove that they know the cluster's secret, without sending it. Pure: bytes in, bytes out.

    client                                server
      hello() ------ Hello body ----------> receive_hello()
      receive_hello() <---- Hello body ---- hello()           (the two Hellos cross)
         '---------- Proof body ----------> receive_proof()
      receive_proof() <---- Proof body ----'

    mac = HMAC-SHA256(secret, kind NUL role NUL  len(client's Hello) client's Hello  len(server's Hello) server's Hello)

The Hello bodies enter the MAC as the very bytes that were sent, so both nonces, both identities and the version are
covered whatever encoder made them. `role` is the prover's, "client" or "server": a proof sent back to its maker is
wrong. The nonces are new for every connection: a recorded proof is wrong. `kind` names what the connection is for:
a proof made for one kind is wrong for another. Afterwards the connection is neither encrypted nor signed; the
cluster's network is trusted that far, or TLS is around it all (pd_rpc.tls).

Connections that are not RPC use the same object with their own `kind` (see pd_rpc.blocking for sockets), or carry
the four bodies by any means of their own.
"""

from __future__ import annotations

import enum
import hmac
import struct

from pd_core.errors import AuthenticationFailed, ConfigError, InvalidTransition, ProtocolError
from pd_rpc.frames import WIRE_VERSION
from pd_rpc.wire import HANDSHAKE_DECODER, Hello, PeerIdentity, Proof, decode, encode

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_NAME_CHARS = 128
CONTROL_KIND = "kvrelay control"
"""`kind` of RPC connections."""


class Side(enum.Enum):
    """Who connected and who was connected to."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> Side:
        return Side.SERVER if self is Side.CLIENT else Side.CLIENT


class Challenge:
    """One side of one mutual proof; good for one connection.

    secret: at least 16 bytes, the same for the whole cluster
    nonce:  32 fresh random bytes
    kind:   what the connection is for; the same on both sides
    Raises ConfigError for a secret that is too short to protect anything.
    """

    def __init__(self, side: Side, secret: bytes, identity: PeerIdentity, nonce: bytes, *, kind: str) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"the cluster's secret has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        self._side = side
        self._secret = secret
        self._nonce = nonce
        self._kind = kind
        self._our_hello = encode(Hello(WIRE_VERSION, identity, nonce))
        self._their_hello: bytes | None = None
        self._their_identity: PeerIdentity | None = None
        self.peer: PeerIdentity | None = None
        """Who the other side is; None until it has proved itself."""

    def hello(self) -> bytes:
        """Our Hello body: the first thing to send."""
        return self._our_hello

    def receive_hello(self, body: bytes) -> bytes:
        """Takes the other side's Hello body; our Proof body, to be sent. Raises ProtocolError."""
        if self._their_hello is not None:
            raise ProtocolError("a second Hello on one connection")
        hello = decode(HANDSHAKE_DECODER, body)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"{type(hello).__name__} came before Hello")
        if hello.wire_version != WIRE_VERSION:
            raise ProtocolError(f"wire version: ours {WIRE_VERSION}, theirs {hello.wire_version}")
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError(f"nonce of {len(hello.nonce)} bytes, not {NONCE_BYTES}")
        _check_names(hello.identity)
        if hmac.compare_digest(hello.nonce, self._nonce):
            raise AuthenticationFailed("the peer sent our own Hello back")
        self._their_hello = body
        self._their_identity = hello.identity
        return encode(Proof(self._mac(self._side)))

    def receive_proof(self, body: bytes) -> PeerIdentity:
        """Takes the other side's Proof body; who it is. Raises AuthenticationFailed or ProtocolError."""
        if self._their_hello is None or self._their_identity is None:
            raise ProtocolError("Proof came before Hello")
        if self.peer is not None:
            raise InvalidTransition("the peer has proved itself already")
        proof = decode(HANDSHAKE_DECODER, body)
        if not isinstance(proof, Proof):
            raise ProtocolError(f"{type(proof).__name__} came instead of Proof")
        if not hmac.compare_digest(proof.mac, self._mac(self._side.other)):
            raise AuthenticationFailed(
                f"the peer that calls itself {self._their_identity} does not know this cluster's secret, "
                f"or takes this for another kind of connection than {self._kind!r}"
            )
        self.peer = self._their_identity
        return self.peer

    def _mac(self, prover: Side) -> bytes:
        if self._their_hello is None:
            raise InvalidTransition("no proof without the other side's Hello")
        hellos = [self._our_hello, self._their_hello]
        if self._side is Side.SERVER:
            hellos.reverse()
        transcript = b"".join(
            [
                self._kind.encode() + b"\0" + prover.value.encode() + b"\0",
                *(struct.pack(">I", len(hello)) + hello for hello in hellos),
            ]
        )
        return hmac.digest(self._secret, transcript, "sha256")


def _check_names(identity: PeerIdentity) -> None:
    """Names end up in logs and errors, whoever sent them."""
    for field in (identity.name, identity.role, identity.incarnation):
        if len(field) > MAX_NAME_CHARS or not field.isprintable():
            raise ProtocolError(f"a name in Hello is longer than {MAX_NAME_CHARS} characters or not printable")
