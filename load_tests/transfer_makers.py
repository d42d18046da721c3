"""Who makes the halves of each way."""

from __future__ import annotations

from load_tests.bare_memcpy import MemcpySource
from load_tests.bare_shm import BareShmSource, BareShmTarget
from load_tests.bare_socket import BareSocketSource, BareSocketTarget
from load_tests.bare_ucxx import BareUcxxSource, BareUcxxTarget
from load_tests.call_ways import BareCallSource, BareCallTarget, ControlCallSource, ControlCallTarget
from load_tests.own_paths import OwnSource, OwnTarget
from load_tests.peer_mooncake import MooncakeSource, MooncakeTarget
from load_tests.peer_nixl import NixlSource, NixlTarget
from load_tests.transfer_halves import Offerer, Pool, SourceHalf
from load_tests.transfer_ways import Way


def make_source(way: Way, pool: Pool, secret: bytes) -> SourceHalf:
    """Raises KvrelayError or OSError, or what a library raises that is not there or cannot start here."""
    match way.name:
        case "memcpy":
            return MemcpySource(pool)
        case "bare_shm":
            return BareShmSource(pool)
        case "bare_socket":
            return BareSocketSource(pool)
        case "bare_ucxx":
            return BareUcxxSource(pool)
        case "bare_ucxx_polling":
            return BareUcxxSource(pool, pause_ms=0)
        case "bare_call":
            return BareCallSource()
        case "control_call":
            return ControlCallSource(secret)
        case "nixl":
            return NixlSource(pool)
        case "mooncake":
            return MooncakeSource(pool)
        case _:
            return OwnSource(way, pool, secret)


def make_target(way: Way, pool: Pool, secret: bytes) -> Offerer | None:
    """None for a way that is all in its source. Raises as `make_source` does."""
    match way.name:
        case "memcpy":
            return None
        case "bare_shm":
            return BareShmTarget(pool)
        case "bare_socket":
            return BareSocketTarget(pool)
        case "bare_ucxx":
            return BareUcxxTarget(pool)
        case "bare_ucxx_polling":
            return BareUcxxTarget(pool, pause_ms=0)
        case "bare_call":
            return BareCallTarget()
        case "control_call":
            return ControlCallTarget(secret)
        case "nixl":
            return NixlTarget(pool)
        case "mooncake":
            return MooncakeTarget(pool)
        case _:
            return OwnTarget(way, pool, secret)
