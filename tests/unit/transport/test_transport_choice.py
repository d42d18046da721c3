"""Which way a push goes."""

import pytest

from kv_transport.choice import RoutedSender, choose_path
from kv_transport.interface import PushReceipt
from pd_core.errors import TransferError
from pd_core.ticket import Ticket, TicketRef, TransportAddress

TCP, TCP_2, INPROC, RDMA = (
    TransportAddress("tcp", "::1", 1),
    TransportAddress("tcp", "10.0.0.1", 2),
    TransportAddress("inproc", "x", 3),
    TransportAddress("rdma", "y", 4),
)


class RecordingSender:
    def __init__(self, path, error=None):
        self.path = path
        self.error = error
        self.tickets = []
        self.is_closed = False

    async def push(self, ticket, indices, block_ids, digests, deadline_s):
        self.tickets.append(ticket)
        return PushReceipt(self.path, len(indices), 0.0)

    async def close(self):
        self.is_closed = True
        if self.error:
            raise self.error


def ticket(*addresses):
    return Ticket(TicketRef("t", "boot", 1, 0), "r", 0, [0], 3.0, "h", 1, list(addresses))


@pytest.mark.parametrize(
    ("offered", "ours", "expected"),
    [
        ([TCP, INPROC], ["tcp", "inproc"], "tcp"),
        ([INPROC, TCP], ["tcp", "inproc"], "inproc"),
        ([RDMA, INPROC, TCP], ["tcp"], "tcp"),
    ],
)
def test_the_first_address_that_we_can_write_to_wins(offered, ours, expected):
    assert choose_path(offered, ours) == expected


@pytest.mark.parametrize("offered", [[RDMA], []])
def test_when_no_path_fits_the_error_names_what_both_sides_have(offered):
    with pytest.raises(TransferError, match=r"offers (rdma y:4|nothing); we have tcp, inproc"):
        choose_path(offered, ["tcp", "inproc"])


async def test_the_chosen_sender_sees_the_addresses_of_its_own_path_in_their_order():
    tcp, inproc = RecordingSender("tcp"), RecordingSender("inproc")
    sender = RoutedSender({"inproc": inproc, "tcp": tcp})
    receipt = await sender.push(ticket(RDMA, TCP_2, INPROC, TCP), [0], [1], [2], 1.0)
    assert receipt.path == "tcp"
    assert tcp.tickets[0].addresses == [TCP_2, TCP]
    assert inproc.tickets == []


async def test_an_unknown_path_alone_is_an_error():
    with pytest.raises(TransferError, match="rdma"):
        await RoutedSender({"tcp": RecordingSender("tcp")}).push(ticket(RDMA), [0], [1], [2], 1.0)


async def test_closing_closes_all_also_when_one_of_them_fails_to():
    first, second = RecordingSender("tcp", TransferError("stuck")), RecordingSender("inproc")
    with pytest.raises(ExceptionGroup) as caught:
        await RoutedSender({"tcp": first, "inproc": second}).close()
    assert caught.value.exceptions == (first.error,)
    assert second.is_closed
