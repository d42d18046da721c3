"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`, with the true status."""

from __future__ import annotations

import math

import msgspec

from pd_core.errors import InvalidRequest, KvrelayError, Unavailable

DEFAULT_RETRY_S = 1.0

Headers = list[tuple[bytes, bytes]]


class MethodNotAllowed(InvalidRequest):
    http_status = 405
    code = "method_not_allowed"


class Forbidden(InvalidRequest):
    http_status = 403
    error_type = "permission_error"
    code = "forbidden"


class BodyTooSlow(InvalidRequest):
    """The client took too long to send its request."""

    http_status = 408
    code = "request_timeout"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


def error_json(error: KvrelayError) -> bytes:
    """The body of an error reply, and the data of an error event."""
    return msgspec.json.encode(ErrorReply(ErrorBody(error.message, error.error_type, error.param, error.code)))


def error_headers(error: KvrelayError) -> Headers:
    """Headers that an error of this kind has besides the usual: when to come back, in whole seconds >= 1."""
    retry_after_s = error.retry_after_s
    if retry_after_s is None and isinstance(error, Unavailable):
        retry_after_s = DEFAULT_RETRY_S
    if retry_after_s is None:
        return []
    return [(b"retry-after", str(max(1, math.ceil(retry_after_s))).encode())]
