"""States of a connection before its first call, the same on both sides and for every kind of connection.

    NEW -> AWAITING_HELLO --Hello--> AWAITING_PROOF --Proof--> CHECKING --accept--> AWAITING_READY --Ready--> DONE
             \\_________________________\\____________________\\___refuse____________\\______> FAILED

In CHECKING the peer is known to belong to the cluster, and the owner of the connection decides whether the two fit
(`accept` or `refuse`). A Ready that comes meanwhile is kept until we have decided too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from pd_core.errors import InvalidTransition, KvrelayError, ProtocolError, WorkerLost, from_wire
from pd_rpc.auth import Challenge
from pd_rpc.wire import HANDSHAKE_DECODER, Close, Hello, PeerIdentity, Proof, Ready, decode, encode, error_info

CheckPeer = Callable[[PeerIdentity, PeerIdentity], None]
"""check_peer(ours, theirs) refuses a peer by raising a KvrelayError, which then travels to it."""


class HandshakeState(enum.Enum):
    NEW = "new"  # nothing sent
    AWAITING_HELLO = "awaiting hello"  # our Hello is out
    AWAITING_PROOF = "awaiting proof"  # our Proof is out
    CHECKING = "checking"  # the peer proved itself; our owner decides
    AWAITING_READY = "awaiting ready"  # we accepted, the peer has not yet
    DONE = "done"  # both accepted
    FAILED = "failed"  # over


class Handshake:
    """Feeds bodies to a Challenge and adds the mutual consent. Pure; bodies are unframed."""

    def __init__(self, challenge: Challenge) -> None:
        self._challenge = challenge
        self._peer_is_ready = False
        self.state = HandshakeState.NEW

    @property
    def peer(self) -> PeerIdentity | None:
        """Who the other side is; None until it has proved itself."""
        return self._challenge.peer

    def require_peer(self) -> PeerIdentity:
        """Who the other side is. Raises InvalidTransition before it has proved itself."""
        if self._challenge.peer is None:
            raise InvalidTransition(f"handshake is {self.state.value}: the peer has not proved itself")
        return self._challenge.peer

    def start(self) -> bytes:
        """Our Hello body, to be sent."""
        self._require(HandshakeState.NEW, "start")
        self.state = HandshakeState.AWAITING_HELLO
        return self._challenge.hello()

    def receive(self, body: bytes) -> bytes | None:
        """Takes a body; what to answer, if anything. The caller looks at `state` afterwards.

        Raises ProtocolError, AuthenticationFailed, or the error with which the peer refused; then it is FAILED.
        """
        if self.state in (HandshakeState.NEW, HandshakeState.DONE, HandshakeState.FAILED):
            raise InvalidTransition(f"handshake is {self.state.value}: it takes no message")
        try:
            return self._receive(body)
        except KvrelayError:
            self.state = HandshakeState.FAILED
            raise

    def _receive(self, body: bytes) -> bytes | None:
        message = decode(HANDSHAKE_DECODER, body)
        match self.state, message:
            case _, Close(error=error):
                raise WorkerLost("the peer left during the handshake") if error is None else from_wire(error)
            case HandshakeState.AWAITING_HELLO, Hello():
                proof = self._challenge.receive_hello(body)
                self.state = HandshakeState.AWAITING_PROOF
                return proof
            case HandshakeState.AWAITING_PROOF, Proof():
                self._challenge.receive_proof(body)
                self.state = HandshakeState.CHECKING
                return None
            case HandshakeState.CHECKING, Ready() if not self._peer_is_ready:
                self._peer_is_ready = True
                return None
            case HandshakeState.AWAITING_READY, Ready():
                self.state = HandshakeState.DONE
                return None
            case _:
                raise ProtocolError(f"{type(message).__name__} came while {self.state.value}")

    def accept(self) -> bytes:
        """We are willing: our Ready body, to be sent."""
        self._require(HandshakeState.CHECKING, "accept")
        self.state = HandshakeState.DONE if self._peer_is_ready else HandshakeState.AWAITING_READY
        return encode(Ready())

    def refuse(self, error: KvrelayError | None) -> bytes:
        """We are not, or the handshake has failed or took too long: the body that tells the peer why."""
        if self.state is HandshakeState.DONE:
            raise InvalidTransition("handshake is done: nothing to refuse")
        self.state = HandshakeState.FAILED
        return encode(Close(None if error is None else error_info(error)))

    def _require(self, state: HandshakeState, action: str) -> None:
        if self.state is not state:
            raise InvalidTransition(f"cannot {action}: handshake is {self.state.value}")
