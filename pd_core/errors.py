"""Every error that kvrelay raises on purpose.

One class for one kind of trouble. Each knows how it looks to an HTTP client (`http_status`, `error_type`, `code`,
`param`), whether the same request may be tried again elsewhere (`retryable`), and travels between processes as an
`ErrorInfo`: `to_wire` on one side, `from_wire` gives back the same class with the same fields on the other. The same
two functions make errors pickle.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on the wire. `kind` is the class name; an unknown kind becomes a plain `KvrelayError`."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class KvrelayError(Exception):
    """Root of all errors of kvrelay. `message` is a sentence for the one who has to act on it."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (self.to_wire(),)

    def to_wire(self) -> ErrorInfo:
        return ErrorInfo(type(self).__name__, self.message, self.param, self.retry_after_s)


class InvalidRequest(KvrelayError):
    """The client asked for something that cannot be meant. `param` names the field."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt + max_tokens, is more than the context or a pool can ever hold."""

    code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    http_status = 404
    code = "model_not_found"


class NotFound(InvalidRequest):
    http_status = 404
    code = "not_found"


class PayloadTooLarge(InvalidRequest):
    http_status = 413
    code = "payload_too_large"


class Overloaded(KvrelayError):
    """No room now; a bounded queue is full. Nothing was computed. `retry_after_s` says when to come back."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "overloaded"
    retryable = True


class Unavailable(KvrelayError):
    """Nobody can serve this now: starting, draining, or no worker of a needed role."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "unavailable"
    retryable = True


class WorkerLost(Unavailable):
    """A worker died, fell silent or was replaced while it held this request."""

    code = "worker_lost"


class DeadlineExceeded(KvrelayError):
    """The request's own deadline, or the deadline of one step of it, has passed."""

    http_status = 504
    error_type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(KvrelayError):
    """The caller gave up; the work was stopped on its behalf."""

    http_status = 499
    code = "cancelled"


class ConfigError(KvrelayError):
    """A setting is wrong. `param` is its path in the config tree."""

    code = "config_error"


class ModelError(KvrelayError):
    """The model's files cannot be served; the sentence says which part and why."""

    code = "model_error"


class EngineError(KvrelayError):
    """The engine failed inside a step; the steps of that call have no result."""

    code = "engine_error"


class ProtocolError(KvrelayError):
    """A peer sent bytes that the wire format does not allow. The connection is closed."""

    http_status = 502
    code = "protocol_error"


class AuthenticationFailed(ProtocolError):
    """A peer could not prove that it knows the cluster's secret."""

    code = "authentication_failed"


class TransferError(KvrelayError):
    """KV blocks did not get across."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "transfer_error"
    retryable = True


class Unreachable(TransferError):
    """No connection to a pool could be made, within its own deadline. The sentence names every address."""

    code = "unreachable"


class LayoutMismatch(TransferError):
    """Two pools store KV differently; pairing is refused.

    Both values are named, because whoever reads this has two configs to compare.
    """

    code = "layout_mismatch"
    retryable = False


class DigestMismatch(TransferError):
    """A block arrived with other bytes than were sent."""

    code = "digest_mismatch"


class LeaseExpired(TransferError):
    """The writer of a ticket was silent for longer than its lease."""

    code = "lease_expired"


class StaleTicket(TransferError):
    """The ticket belongs to another boot, reservation or attempt, or is over."""

    code = "stale_ticket"
    retryable = False


class TokenMismatch(KvrelayError):
    """Two workers gave different tokens for one index; the attempt is failed rather than guessed."""

    code = "token_mismatch"


class InvalidTransition(KvrelayError):
    """A state machine was given an event that its table does not have: a fault of ours. Nothing was changed."""

    code = "invalid_transition"


class LedgerCorrupt(KvrelayError):
    """A block is in no state, or in two. Raised by `validate`; a fault of ours."""

    code = "ledger_corrupt"


def _family(root: type[KvrelayError]) -> dict[str, type[KvrelayError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_family(child))
    return found


def from_wire(info: ErrorInfo) -> KvrelayError:
    """The error that `to_wire` described, as its own class again."""
    # Looked up anew each time: a package may add kinds of its own after this module was imported.
    kind = _family(KvrelayError).get(info.kind, KvrelayError)
    return kind(info.message, param=info.param, retry_after_s=info.retry_after_s)
