"""The server's side of a connection, sans-IO: which calls are open, how many items each may still send.

A call:  (unknown) --Call--> SERVING --end | fail--> (over)
                               '--Cancel--> CANCELLED --end | fail--> (over)

Only `end` and `fail` finish a call, also a cancelled one: the client keeps its id until it hears of it.

Items wait until bytes are asked for, or until something else is said, and then leave in one frame: a step of a decode
worker brings one for each of its streams, and a frame of its own for each costs both sides more than the item does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pd_core.errors import InvalidTransition, KvrelayError, Overloaded, ProtocolError
from pd_rpc.auth import Challenge
from pd_rpc.connection import Connection, Event
from pd_rpc.limits import MAX_CREDIT, MAX_DEADLINE_S, MAX_FRAME_ITEMS, RpcLimits
from pd_rpc.wire import SERVER_DECODER, Call, Cancel, Credit, End, Failed, Items, encode, error_info

_ITEMS_OPEN_BYTES = 17
"""Of a frame's body, before and between its two lists, at most."""
_CALL_ID_BYTES = 9
"""At most."""


class CallReceived(msgspec.Struct, frozen=True):
    """A new call. body: msgpack bytes, well-formed but not yet decoded."""

    call_id: int
    deadline_s: float
    body: msgspec.Raw


class CallCancelled(msgspec.Struct, frozen=True):
    """The client gave an open call up. It must still be finished with `end` or `fail`."""

    call_id: int


class CreditGranted(msgspec.Struct, frozen=True):
    """An open call may send more items."""

    call_id: int


class _ServedCall(msgspec.Struct):
    credit: int
    is_cancelled: bool = False


class ServerConnection(Connection):
    """Core of a server's connection. Illegal calls raise InvalidTransition and change nothing."""

    _decoder = SERVER_DECODER

    def __init__(self, challenge: Challenge, limits: RpcLimits, now_s: float) -> None:
        super().__init__(challenge, limits, now_s)
        self._calls: dict[int, _ServedCall] = {}
        self._last_call_id = 0
        self._items: list[tuple[int, msgspec.Raw]] = []
        self._num_item_bytes = 0

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def credit(self, call_id: int) -> int:
        """How many items the call may send now."""
        return self._call(call_id).credit

    def is_cancelled(self, call_id: int) -> bool:
        return self._call(call_id).is_cancelled

    def send_item(self, call_id: int, body: Any) -> None:
        """Queues one item. Raises KvrelayError when it does not fit into a frame."""
        self._require_open("send an item")
        call = self._call(call_id)
        if call.is_cancelled:
            raise InvalidTransition(f"call {call_id} is cancelled: it takes no items")
        if call.credit == 0:
            raise InvalidTransition(f"call {call_id} has no credit left")
        data = encode(body)
        num_bytes = _CALL_ID_BYTES + len(data)
        most_bytes = self.limits.max_body_bytes - _ITEMS_OPEN_BYTES
        if num_bytes > most_bytes:
            raise KvrelayError(f"an answer of {len(data)} bytes, a frame holds {self.limits.max_body_bytes}")
        if self._num_item_bytes + num_bytes > most_bytes or len(self._items) == MAX_FRAME_ITEMS:
            self._queue_items()
        call.credit -= 1
        self._items.append((call_id, msgspec.Raw(data)))
        self._num_item_bytes += num_bytes
        self.num_unsent_bytes += num_bytes

    def end(self, call_id: int) -> None:
        """The call is over, all its items are queued."""
        self._finish(call_id, End(call_id))

    def fail(self, call_id: int, error: KvrelayError) -> None:
        """The call is over because of `error`."""
        self._finish(call_id, Failed(call_id, error_info(error)))

    def data_to_send(self, now_s: float) -> bytes:
        self._queue_items()
        return super().data_to_send(now_s)

    def _queue_body(self, body: bytes) -> None:
        self._queue_items()  # what was said before
        super()._queue_body(body)

    def _queue_items(self) -> None:
        """Puts the items that wait into a frame."""
        if not self._items:
            return
        call_ids, bodies = zip(*self._items, strict=True)
        self.num_unsent_bytes -= self._num_item_bytes
        self._items, self._num_item_bytes = [], 0
        super()._queue_body(encode(Items(list(call_ids), list(bodies))))

    def _finish(self, call_id: int, message: End | Failed) -> None:
        self._require_open("finish a call")
        self._call(call_id)
        del self._calls[call_id]
        self._queue(message)

    def _call(self, call_id: int) -> _ServedCall:
        call = self._calls.get(call_id)
        if call is None:
            raise InvalidTransition(f"call {call_id} is not open")
        return call

    def _on_message(self, message: Any) -> list[Event]:
        match message:
            case Call():
                return self._on_call(message)
            case Cancel(call_id=call_id):
                call = self._known(call_id)
                if call is None or call.is_cancelled:
                    return []
                call.is_cancelled = True
                return [CallCancelled(call_id)]
            case Credit(call_id=call_id, num_items=num_items):
                call = self._known(call_id)
                if call is None:
                    return []
                call.credit = _checked_credit(call.credit + _checked_credit(num_items))
                return [CreditGranted(call_id)]
            case _:
                return super()._on_message(message)

    def _on_call(self, call: Call) -> list[Event]:
        if call.call_id <= self._last_call_id:
            raise ProtocolError(f"call {call.call_id} after call {self._last_call_id}: ids must grow")
        if not 0 < call.deadline_s <= MAX_DEADLINE_S:
            raise ProtocolError(f"deadline of {call.deadline_s} s: more than 0, at most {MAX_DEADLINE_S:g}")
        credit = _checked_credit(call.credit)
        self._last_call_id = call.call_id
        if len(self._calls) >= self.limits.max_calls:
            error = Overloaded(f"{self.limits.max_calls} calls are open on this connection", retry_after_s=1.0)
            self._queue(Failed(call.call_id, error_info(error)))
            return []
        self._calls[call.call_id] = _ServedCall(credit)
        return [CallReceived(call.call_id, call.deadline_s, call.body)]

    def _known(self, call_id: int) -> _ServedCall | None:
        """The call, or None if it was over when the client's message crossed our End."""
        if not 0 < call_id <= self._last_call_id:
            raise ProtocolError(f"message for call {call_id}, which was never made")
        return self._calls.get(call_id)


def _checked_credit(num_items: int) -> int:
    if not 1 <= num_items <= MAX_CREDIT:
        raise ProtocolError(f"credit of {num_items} items: at least 1, at most {MAX_CREDIT}")
    return num_items
