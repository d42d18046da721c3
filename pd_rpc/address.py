"""How addresses and errors about them are written."""

from __future__ import annotations

import msgspec

from pd_core.errors import KvrelayError, from_wire


def format_address(host: str, port: int) -> str:
    """host:port, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_address(error: KvrelayError, address: str) -> KvrelayError:
    """The same error, its sentence beginning with the address that it is about."""
    info = error.to_wire()
    return from_wire(msgspec.structs.replace(info, message=f"{address}: {info.message}"))
