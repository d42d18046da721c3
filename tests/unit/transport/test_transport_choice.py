"""Which way a push goes, and what is remembered of the ways."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transport.choice import RoutedSender, usable_paths
from kv_transport.interface import PushReceipt
from kv_transport.path_book import FIRST_RETRY_S, LONGEST_RETRY_S, MAX_RECEIVERS, WORKS, PathBook
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pd_core.ticket import Ticket, TicketRef, TransportAddress

SHM, TCP, TCP_2, INPROC, RDMA = (
    TransportAddress("shm", "@name", 0),
    TransportAddress("tcp", "::1", 1),
    TransportAddress("tcp", "10.0.0.1", 2),
    TransportAddress("inproc", "x", 3),
    TransportAddress("rdma", "y", 4),
)


class RecordingSender:
    """errors: what the next pushes raise, one after the other; None is a push that works."""

    def __init__(self, path, *errors, close_error=None, takes_s=0.0):
        self.path = path
        self.errors = list(errors)
        self.close_error = close_error
        self.takes_s = takes_s
        self.tickets = []
        self.deadlines_s = []
        self.is_closed = False

    async def push(self, ticket, indices, block_ids, digests, deadline_s):
        self.tickets.append(ticket)
        self.deadlines_s.append(deadline_s)
        await asyncio.sleep(self.takes_s)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return PushReceipt(self.path, len(indices), 0.0)

    async def close(self):
        self.is_closed = True
        if self.close_error:
            raise self.close_error


def ticket(*addresses, boot="boot"):
    return Ticket(TicketRef("t", boot, 1, 0), "r", 0, [0], 3.0, "h", 1, list(addresses))


async def push(sender, *addresses, boot="boot", deadline_s=1.0):
    return (await sender.push(ticket(*addresses, boot=boot), [0], [1], [2], deadline_s)).path


@pytest.mark.parametrize(
    ("offered", "ours", "expected"),
    [
        ([SHM, TCP], ["tcp", "shm"], ["shm", "tcp"]),
        ([TCP, SHM, TCP_2], ["shm", "tcp"], ["tcp", "shm"]),
        ([RDMA, INPROC, TCP], ["tcp"], ["tcp"]),
    ],
)
def test_the_ticket_says_which_of_our_paths_is_best(offered, ours, expected):
    assert usable_paths(offered, ours) == expected


@pytest.mark.parametrize("offered", [[RDMA], []])
def test_when_no_path_fits_the_error_names_what_both_sides_have(offered):
    with pytest.raises(TransferError, match=r"offers (rdma y:4|nothing); we have tcp, inproc"):
        usable_paths(offered, ["tcp", "inproc"])


async def test_a_sender_that_is_allowed_shared_memory_alone_says_so_to_a_ticket_that_has_none():
    with pytest.raises(TransferError, match=r"offers tcp \[::1\]:1; we have shm"):
        await push(RoutedSender({"shm": RecordingSender("shm")}), TCP)


async def test_the_chosen_sender_sees_the_addresses_of_its_own_path_in_their_order():
    tcp, inproc = RecordingSender("tcp"), RecordingSender("inproc")
    sender = RoutedSender({"inproc": inproc, "tcp": tcp})
    assert await push(sender, RDMA, TCP_2, INPROC, TCP) == "tcp"
    assert tcp.tickets[0].addresses == [TCP_2, TCP]
    assert inproc.tickets == []


async def test_a_push_whose_path_fails_goes_on_over_the_next_and_later_ones_stay_there(caplog):
    shm, tcp = RecordingSender("shm", TransferError("@name: gone")), RecordingSender("tcp")
    sender = RoutedSender({"shm": shm, "tcp": tcp})
    assert [await push(sender, SHM, TCP) for _ in range(5)] == ["tcp"] * 5
    assert len(shm.tickets) == 1
    assert sender.paths()["boot"]["shm"].reason == "@name: gone"
    assert sender.paths()["boot"]["tcp"] == WORKS
    assert "KV path shm to boot boot failed, 1 in a row: @name: gone" in caplog.text
    assert sender.path_to("boot") == "tcp (shm failed, 1 in a row: @name: gone)"
    assert sender.path_to("another") == ""


async def test_who_has_to_use_tcp_is_told_why_a_better_path_is_left_out_and_others_are_not():
    left_out = {"ucx": "ucxx is not installed"}
    sender = RoutedSender({"shm": RecordingSender("shm"), "tcp": RecordingSender("tcp")}, left_out)
    await push(sender, SHM, TCP, boot="near")
    await push(sender, TCP, boot="far")
    assert sender.path_to("near") == "shm"
    assert sender.path_to("far") == "tcp; ucx is not used: ucxx is not installed"
    assert sender.path_to("unknown") == ""


async def test_what_one_boot_of_a_receiver_cannot_do_another_boot_is_asked_again():
    shm, tcp = RecordingSender("shm", TransferError("gone")), RecordingSender("tcp")
    sender = RoutedSender({"shm": shm, "tcp": tcp})
    assert [await push(sender, SHM, TCP, boot=boot) for boot in ("old", "new", "old")] == ["tcp", "shm", "tcp"]


async def test_a_better_path_that_works_again_is_the_only_one_that_is_named():
    shm, tcp = RecordingSender("shm", TransferError("gone")), RecordingSender("tcp")
    sender = RoutedSender({"shm": shm, "tcp": tcp})
    assert [await push(sender, *addresses) for addresses in ((TCP,), (SHM, TCP))] == ["tcp", "tcp"]
    assert sender.path_to("boot") == "tcp (shm failed, 1 in a row: gone)"
    assert await push(sender, SHM) == "shm"
    assert sender.path_to("boot") == "shm"


async def test_a_path_that_is_the_only_one_is_tried_although_it_failed_a_moment_ago():
    shm = RecordingSender("shm", TransferError("gone"))
    sender = RoutedSender({"shm": shm})
    with pytest.raises(TransferError, match=r"^gone$"):
        await push(sender, SHM)
    assert sender.path_to("boot") == "none (shm failed, 1 in a row: gone)"
    assert await push(sender, SHM) == "shm"
    assert sender.path_to("boot") == "shm"
    assert sender.paths() == {"boot": {"shm": WORKS}}


async def test_when_all_fail_the_error_names_them_all():
    senders = {path: RecordingSender(path, TransferError(f"{path} is broken")) for path in ("shm", "tcp")}
    with pytest.raises(TransferError, match=r"shm: shm is broken; tcp: tcp is broken"):
        await push(RoutedSender(senders), SHM, TCP)


async def test_a_pool_that_keeps_other_kv_is_not_asked_over_another_path():
    tcp = RecordingSender("tcp")
    sender = RoutedSender({"shm": RecordingSender("shm", LayoutMismatch("other kv")), "tcp": tcp})
    with pytest.raises(LayoutMismatch):
        await push(sender, SHM, TCP)
    assert tcp.tickets == []


async def test_after_a_path_that_used_the_deadline_up_no_other_is_tried_and_later_pushes_leave_it():
    shm = RecordingSender("shm", DeadlineExceeded("stuck"))
    tcp = RecordingSender("tcp")
    sender = RoutedSender({"shm": shm, "tcp": tcp})
    with pytest.raises(DeadlineExceeded):
        await push(sender, SHM, TCP)
    assert tcp.tickets == []
    assert await push(sender, SHM, TCP) == "tcp"


async def test_the_next_path_has_the_whole_deadline_because_the_time_before_may_have_been_a_wait_for_its_turn():
    shm, tcp = RecordingSender("shm", TransferError("gone"), takes_s=0.02), RecordingSender("tcp")
    await push(RoutedSender({"shm": shm, "tcp": tcp}), SHM, TCP, deadline_s=1.0)
    assert tcp.deadlines_s == [1.0]


async def test_a_cancelled_push_says_nothing_against_its_path():
    shm = RecordingSender("shm", takes_s=60.0)
    sender = RoutedSender({"shm": shm, "tcp": RecordingSender("tcp")})
    pushing = asyncio.ensure_future(push(sender, SHM, TCP))
    await asyncio.sleep(0)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert sender.paths() == {"boot": {}}


async def test_closing_closes_all_also_when_one_of_them_fails_to():
    first, second = RecordingSender("tcp", close_error=TransferError("stuck")), RecordingSender("inproc")
    with pytest.raises(ExceptionGroup) as caught:
        await RoutedSender({"tcp": first, "inproc": second}).close()
    assert caught.value.exceptions == (first.close_error,)
    assert second.is_closed


def test_a_path_waits_twice_as_long_after_each_failure_in_a_row_up_to_a_minute():
    book, waits_s, now_s = PathBook(), [], 100.0
    for _ in range(9):
        now_s = book.failed("boot", "shm", "gone", now_s).retry_s
        waits_s.append(now_s - 100.0 - sum(waits_s))
        assert book.order("boot", ["shm", "tcp"], now_s - 0.001) == ["tcp", "shm"]
        assert book.order("boot", ["shm", "tcp"], now_s) == ["shm", "tcp"]
    assert waits_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert book.worked("boot", "shm")
    assert not book.worked("boot", "shm")
    assert book.failed("boot", "shm", "gone again", now_s).retry_s == now_s + FIRST_RETRY_S


def test_only_so_many_receivers_are_remembered():
    book = PathBook()
    book.failed("first", "shm", "gone", 0.0)
    for number in range(3 * MAX_RECEIVERS):
        book.order("first", ["shm"], 0.0)
        book.failed(f"boot-{number}", "shm", "gone", 0.0)
    assert len(book.report()) == MAX_RECEIVERS
    assert book.report()["first"]["shm"].num_failures == 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["boot-1", "boot-2"]),
        st.sampled_from(["shm", "tcp", "ucx"]),
        st.sampled_from(["worked", "failed", "asked"]),
        st.floats(0.0, 40.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_every_path_is_offered_once_and_none_that_works_stands_behind_one_that_failed(events):
    book, now_s, paths = PathBook(), 0.0, ["shm", "tcp", "ucx"]
    retry_s: dict[tuple[str, str], float] = {}
    for boot, path, what, passed_s in events:
        now_s += passed_s
        if what == "worked":
            book.worked(boot, path)
            retry_s.pop((boot, path), None)
        elif what == "failed":
            record = book.failed(boot, path, "why", now_s)
            assert record.retry_s - now_s >= FIRST_RETRY_S - 1e-6
            assert record.retry_s - now_s <= LONGEST_RETRY_S + 1e-6
            retry_s[boot, path] = record.retry_s
        order = book.order(boot, paths, now_s)
        assert sorted(order) == paths
        is_late = [retry_s.get((boot, each), 0.0) > now_s for each in order]
        assert is_late == sorted(is_late)
        assert [each for each, late in zip(order, is_late, strict=True) if not late] == [
            each for each in paths if retry_s.get((boot, each), 0.0) <= now_s
        ]
