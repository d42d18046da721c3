"""What is counted of pushes, by path: what got through, what failed, and what took a worse path than it should."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transport.choice import RoutedSender
from kv_transport.interface import PushReceipt
from kv_transport.path_tally import PathTally
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pd_core.ticket import Ticket, TicketRef, TransportAddress
from pd_core.transfer import PathTotals

PATHS = ["shm", "ucx", "tcp"]
TICKET = Ticket(
    TicketRef("t", "boot", 1, 0), "r", 0, [0], 3.0, "h", 1, [TransportAddress(path, "h", 1) for path in PATHS]
)


class Sender:
    """Raises `errors` one after the other, then pushes get through."""

    def __init__(self, path, *errors):
        self.path = path
        self.errors = list(errors)

    async def push(self, *_):
        if self.errors:
            raise self.errors.pop(0)
        return PushReceipt(self.path, 100, 0.5)

    async def close(self):
        pass


async def push(sender):
    return (await sender.push(TICKET, [0], [0], [0], 1.0)).path


async def test_a_push_that_takes_a_worse_path_is_counted_every_time_and_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr("kv_transport.path_book.FIRST_RETRY_S", 0.0)  # the path is tried again by every push
    caplog.set_level(logging.INFO)
    senders = {
        "shm": Sender("shm", *(TransferError("gone") for _ in range(3)), DeadlineExceeded("stuck")),
        "ucx": Sender("ucx", TransferError("no device")),
        "tcp": Sender("tcp"),
    }
    sender = RoutedSender(senders)
    assert [await push(sender) for _ in range(3)] == ["tcp", "ucx", "ucx"]
    with pytest.raises(DeadlineExceeded):  # there is no time left for another
        await push(sender)
    assert [await push(sender) for _ in range(2)] == ["shm", "shm"]
    assert sender.totals() == {
        "shm": PathTotals(2, 200, 1.0, failures={"transfer_error": 3, "deadline_exceeded": 1}),
        "tcp": PathTotals(1, 100, 0.5, instead_of={"shm": 1}),
        "ucx": PathTotals(2, 200, 1.0, failures={"transfer_error": 1}, instead_of={"shm": 2}),
    }
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "KV path shm to boot boot failed, 1 in a row: gone",
        "KV path ucx to boot boot failed, 1 in a row: no device",
    ]
    assert "KV path to boot boot: shm works" in caplog.text


async def test_while_a_path_is_backed_off_pushes_pass_it_over_and_count_for_that_too_until_it_is_back(monkeypatch):
    sender = RoutedSender({"shm": Sender("shm", TransferError("gone")), "tcp": Sender("tcp")})
    assert [await push(sender) for _ in range(5)] == ["tcp"] * 5
    assert sender.totals()["tcp"].instead_of == {"shm": 5}
    assert sender.totals()["shm"].failures == {"transfer_error": 1}
    monkeypatch.setattr(sender._book, "order", lambda incarnation, paths, now_s: list(paths))  # its time is over
    assert await push(sender) == "shm"
    assert sender.totals()["shm"].num_pushes == 1
    assert sender.totals()["tcp"].instead_of == {"shm": 5}


async def test_a_refusal_of_our_kv_counts_as_a_failure_of_its_own_kind():
    sender = RoutedSender({"shm": Sender("shm", LayoutMismatch("other kv"))})
    with pytest.raises(LayoutMismatch):
        await push(sender)
    assert sender.totals() == {"shm": PathTotals(failures={"layout_mismatch": 1})}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["got_through", "failed"]),
        st.sampled_from(PATHS),
        st.sampled_from(PATHS),
        st.integers(0, 1 << 40),
        st.sampled_from(["transfer_error", "deadline_exceeded"]),
    ),
    max_size=50,
)


@given(EVENTS)
def test_the_totals_are_the_sums_of_what_was_told(events):
    tally = PathTally()
    for what, path, best, num_bytes, code in events:
        if what == "failed":
            tally.failed(path, code)
        else:
            tally.got_through(path, best, num_bytes, 0.25)
    totals = tally.totals()
    for path in PATHS:
        ours = [event for event in events if event[1] == path]
        through = [event for event in ours if event[0] == "got_through"]
        known = totals.get(path, PathTotals())
        assert (path in totals) == bool(ours)
        assert (known.num_pushes, known.num_bytes) == (len(through), sum(event[3] for event in through))
        assert known.seconds == 0.25 * len(through)
        assert sum(known.failures.values()) == len(ours) - len(through)
        assert sum(known.instead_of.values()) == sum(event[2] != path for event in through)
