"""The client's side of a connection, sans-IO: which calls are open, which are given up but not yet over.

A call:  open_call --> OPEN --End | Failed--> (over)
                         '--cancel--> CANCELLED --End | Failed--> (over)

Items of a cancelled call are dropped here; its id stays known until the server has finished it. A frame of items is
taken as a whole, or not at all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pd_core.errors import InvalidTransition, KvrelayError, PayloadTooLarge, ProtocolError, from_wire
from pd_rpc.auth import Challenge
from pd_rpc.connection import Connection, ConnectionState, Event
from pd_rpc.limits import RpcLimits
from pd_rpc.wire import CLIENT_DECODER, Call, Cancel, Credit, End, Failed, Items, encode


class ItemsReceived(msgspec.Struct, frozen=True):
    """Answers to open calls, in order: call id and body, msgpack bytes that are well-formed but not yet decoded."""

    items: list[tuple[int, msgspec.Raw]]


class CallEnded(msgspec.Struct, frozen=True):
    """All items of an open call have come."""

    call_id: int


class CallFailed(msgspec.Struct, frozen=True):
    """The server ended an open call with an error."""

    call_id: int
    error: KvrelayError


class _MadeCall(msgspec.Struct):
    credit: int
    is_cancelled: bool = False


class ClientConnection(Connection):
    """Core of a client's connection. Illegal calls raise InvalidTransition and change nothing."""

    _decoder = CLIENT_DECODER

    def __init__(self, challenge: Challenge, limits: RpcLimits, now_s: float) -> None:
        super().__init__(challenge, limits, now_s)
        self._calls: dict[int, _MadeCall] = {}
        self._last_call_id = 0

    @property
    def num_calls(self) -> int:
        """Calls that the server has not finished, the cancelled ones among them."""
        return len(self._calls)

    def open_call(self, body: Any, deadline_s: float, credit: int) -> int:
        """Queues a call; its id. Raises PayloadTooLarge, and then nothing was queued."""
        self._require_open("make a call")
        call_id = self._last_call_id + 1
        data = encode(Call(call_id, deadline_s, credit, msgspec.Raw(encode(body))))
        if len(data) > self.limits.max_body_bytes:
            raise PayloadTooLarge(f"a call of {len(data)} bytes, a frame holds {self.limits.max_body_bytes}")
        self._last_call_id = call_id
        self._calls[call_id] = _MadeCall(credit)
        self._queue_body(data)
        return call_id

    def is_open_call(self, call_id: int) -> bool:
        """Whether it can be cancelled or granted credit: a call may be over whose last events are yet to be seen."""
        call = self._calls.get(call_id)
        return self.state is ConnectionState.OPEN and call is not None and not call.is_cancelled

    def cancel(self, call_id: int) -> None:
        """Gives an open call up: no event of it will come any more."""
        self._open_call(call_id, "cancel").is_cancelled = True
        self._queue(Cancel(call_id))

    def grant(self, call_id: int, num_items: int) -> None:
        """Lets the server send `num_items` more items."""
        self._open_call(call_id, "grant credit").credit += num_items
        self._queue(Credit(call_id, num_items))

    def _open_call(self, call_id: int, action: str) -> _MadeCall:
        self._require_open(action)
        call = self._calls.get(call_id)
        if call is None or call.is_cancelled:
            raise InvalidTransition(f"cannot {action}: call {call_id} is not open")
        return call

    def _on_message(self, message: Any) -> list[Event]:
        match message:
            case Items():  # first: nearly every message
                items = self._take_items(message)
                return [ItemsReceived(items)] if items else []
            case End(call_id=call_id):
                return [] if self._finished(call_id).is_cancelled else [CallEnded(call_id)]
            case Failed(call_id=call_id, error=error):
                is_cancelled = self._finished(call_id).is_cancelled
                return [] if is_cancelled else [CallFailed(call_id, from_wire(error))]
            case _:
                return super()._on_message(message)

    def _take_items(self, message: Items) -> list[tuple[int, msgspec.Raw]]:
        """Those of calls that are not given up."""
        if len(message.call_ids) != len(message.bodies):
            raise ProtocolError(f"{len(message.bodies)} items for {len(message.call_ids)} calls in one frame")
        items = []
        for call_id, body in zip(message.call_ids, message.bodies, strict=True):
            call = self._known(call_id)
            if call.credit == 0:
                raise ProtocolError(f"call {call_id} sent more items than it was granted")
            call.credit -= 1
            if not call.is_cancelled:
                items.append((call_id, body))
        return items

    def _finished(self, call_id: int) -> _MadeCall:
        call = self._known(call_id)
        del self._calls[call_id]
        return call

    def _known(self, call_id: int) -> _MadeCall:
        call = self._calls.get(call_id)
        if call is None:
            raise ProtocolError(f"answer to call {call_id}, which is not open")
        return call
