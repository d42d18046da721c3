"""What UCX is told about itself: by which devices and transports, and how it moves a block."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from pd_core.errors import ConfigError

RDMA_FOLDER = Path("/sys/class/infiniband")
_OPERATORS = ("TLS", "NET_DEVICES")
"""Settings that an operator may make through UCX's own environment variables: UCX_TLS, UCX_NET_DEVICES."""


def ucx_settings(host: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Settings of a UCX context that is reached at `host` and at no other interface, by UCX's names without "UCX_".

    Raises ConfigError when no interface of this host has that address.
    """
    rdma = rdma_devices()
    settings = {
        "TLS": "rc,dc,ud,tcp" if rdma else "tcp",
        "NET_DEVICES": ",".join([*rdma, interface_of(host)]),
        # A block always waits for its receive, and is only written into it by our own side: copied out of UCX's own
        # buffers (tcp) or read from the sender (RDMA). Never put there by the other side: its writes know no tickets.
        "RNDV_THRESH": "0",
        "RNDV_SCHEME": "get_zcopy" if rdma else "am",
        "TCP_PUT_ENABLE": "n",
        # With the usual 8 and 64 KiB the two sides wake each other some 600 times for 36 MB.
        "TCP_TX_SEG_SIZE": "512k",
        "TCP_RX_SEG_SIZE": "512k",
        # Else connecting to a host that is not there would hold our thread for minutes.
        "TCP_CONN_NB": "y",
        "TCP_AF_PRIO": "inet6,inet" if ":" in host else "inet,inet6",
        "RNDV_FRAG_MEM_TYPE": "host",
    }
    made_outside = [name for name in _OPERATORS if f"UCX_{name}" in environment]
    return {name: value for name, value in settings.items() if name not in made_outside}


def interface_of(host: str) -> str:
    """The network interface that has the host's address, as "eth0". Raises ConfigError when there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"transfer.host {host} is no address: {error}", param="transfer.host") from error
    wanted = {where[0] for *_, where in found}
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    raise ConfigError(f"transfer.host {host} is no address of this host: UCX has no interface", param="transfer.host")


def rdma_devices(folder: Path = RDMA_FOLDER) -> Sequence[str]:
    """Ports that are up, as "mlx5_0:1"; empty on a host without RDMA."""
    return sorted(
        f"{port.parent.parent.name}:{port.name}"
        for port in folder.glob("*/ports/*")
        if "ACTIVE" in (port / "state").read_text()
    )
