"""What peers do that send anything but what they should, over whichever socket."""

from __future__ import annotations

import contextlib
import socket

from pd_core.ticket import TicketRef

FIRST_REF = TicketRef("ticket-1", "boot", 1, 0)
"""Of the first ticket of every pair."""


def send(sock: socket.socket, data: bytes) -> None:
    sock.settimeout(5)
    with contextlib.suppress(OSError):  # the other side may have hung up already
        sock.sendall(data)


def is_closed_soon(sock: socket.socket) -> bool:
    """Reads what the other side still says; whether it then hangs up within its limits."""
    sock.settimeout(2)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
