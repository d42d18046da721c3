"""Any order of calls, answers, cancellations and bytes on the way: both sides stay open and agree."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rpc_cores import Answer, Ask, answers, open_pair

from pd_core.errors import Overloaded
from pd_rpc.client_core import CallEnded, CallFailed, ItemsReceived
from pd_rpc.connection import ConnectionState
from pd_rpc.limits import RpcLimits
from pd_rpc.server_core import CallCancelled, CallReceived, CreditGranted

MAX_CALLS = 3


class TwoSides(RuleBasedStateMachine):
    """`to_server` and `to_client` are the bytes on the way; rules carry as many of them as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.server = open_pair(RpcLimits(max_calls=MAX_CALLS))
        self.to_server = b""
        self.to_client = b""
        self.serving: dict[int, int] = {}  # call id -> items sent
        self.waiting: dict[int, int] = {}  # call id -> items received
        self.sent: dict[int, int] = {}
        self.outcomes: dict[int, str] = {}

    def _pick(self, data, ids):
        return data.draw(st.sampled_from(sorted(ids)))

    @rule(credit=st.integers(1, 4))
    def make_a_call(self, credit):
        self.waiting[self.client.open_call(Ask("why"), 1.0, credit)] = 0

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_items=st.integers(1, 3))
    def grant(self, data, num_items):
        self.client.grant(self._pick(data, self.waiting), num_items)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        call_id = self._pick(data, self.waiting)
        self.client.cancel(call_id)
        del self.waiting[call_id]

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def answer(self, data):
        call_id = self._pick(data, self.serving)
        if self.server.credit(call_id) and not self.server.is_cancelled(call_id):
            self.server.send_item(call_id, Answer(self.serving[call_id]))
            self.serving[call_id] += 1

    @precondition(lambda self: self.serving)
    @rule(data=st.data(), well=st.booleans())
    def finish(self, data, well):
        call_id = self._pick(data, self.serving)
        self.sent[call_id] = self.serving.pop(call_id)
        self.outcomes[call_id] = "end" if well else "full"
        if well:
            self.server.end(call_id)
        else:
            self.server.fail(call_id, Overloaded("full"))

    @rule(num_bytes=st.integers(0, 200))
    def carry_to_server(self, num_bytes):
        self.to_server += self.client.data_to_send(0.0)
        data, self.to_server = self.to_server[:num_bytes], self.to_server[num_bytes:]
        for event in self.server.receive(data, 0.0):
            match event:
                case CallReceived(call_id=call_id):
                    self.serving[call_id] = 0
                case CallCancelled(call_id=call_id) | CreditGranted(call_id=call_id):
                    assert call_id in self.serving
                case _:
                    raise AssertionError(event)

    @rule(num_bytes=st.integers(0, 200))
    def carry_to_client(self, num_bytes):
        self.to_client += self.server.data_to_send(0.0)
        data, self.to_client = self.to_client[:num_bytes], self.to_client[num_bytes:]
        for event in self.client.receive(data, 0.0):
            match event:
                case ItemsReceived():
                    for call_id, index in answers(event):
                        assert index == self.waiting[call_id]
                        self.waiting[call_id] += 1
                case CallEnded(call_id=call_id):
                    assert self.outcomes[call_id] == "end"
                    assert self.waiting.pop(call_id) == self.sent[call_id]
                case CallFailed(call_id=call_id, error=error):
                    assert isinstance(error, Overloaded)
                    assert self.outcomes.get(call_id, "full") == "full"
                    assert self.waiting.pop(call_id) == self.sent.get(call_id, 0)
                case _:
                    raise AssertionError(event)

    @invariant()
    def both_are_open_and_bounded(self):
        assert self.client.state is self.server.state is ConnectionState.OPEN
        assert self.server.num_calls == len(self.serving) <= MAX_CALLS

    def teardown(self):
        """When everything is finished and carried, nobody remembers anything."""
        while self.to_server or self.client.num_unsent_bytes:
            self.carry_to_server(200)
        for call_id in list(self.serving):
            self.sent[call_id] = self.serving.pop(call_id)
            self.outcomes[call_id] = "end"
            self.server.end(call_id)
        while self.to_client or self.server.num_unsent_bytes:
            self.carry_to_client(200)
        assert not self.waiting
        assert self.client.num_calls == self.server.num_calls == 0


TestTwoSides = TwoSides.TestCase
TestTwoSides.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
