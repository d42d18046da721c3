"""The paths by which a worker's pool is written to and writes to others, put together in one place, best first."""

from __future__ import annotations

import logging

from kv_transport import shm, tcp, ucx
from kv_transport.choice import RoutedSender
from kv_transport.interface import BlockReceiver, BlockSender
from kv_transport.landing import Landing
from kv_transport.receiver import PathListener, PoolReceiver
from kv_transport.shm_pool import SharedBlockMemory
from kv_transport.shm_receiver import ShmListener
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.tcp_receiver import TcpListener
from kv_transport.tcp_sender import TcpBlockSender
from kv_transport.ucx_probe import examine_ucx
from kv_transport.ucx_receiver import UcxListener
from kv_transport.ucx_sender import UcxBlockSender
from pd_core.config import TransferConfig
from pd_core.memory import BlockMemory
from pd_rpc.tls import Tls
from pd_rpc.wire import PeerIdentity

_log = logging.getLogger(__name__)


def make_receiver(
    memory: BlockMemory,
    identity: PeerIdentity,
    secret: bytes,
    transfer: TransferConfig,
    landing: Landing | None = None,
    *,
    tls: Tls | None = None,
) -> BlockReceiver:
    """Over the paths that the config allows and this host has; its tickets name them best first. Blocks for seconds
    where UCX has to be probed.

    landing: see PoolReceiver; tls: of what leaves the host
    Raises ConfigError when a path that alone is allowed does not work.
    """
    listeners: list[PathListener] = []
    if transfer.path in ("auto", shm.PATH):
        listeners.append(ShmListener(memory, identity, secret))
    if transfer.path in ("auto", ucx.PATH):
        offer = examine_ucx(transfer, has_tls=tls is not None)
        if offer.is_used:
            listeners.append(UcxListener(memory, identity, secret, host=transfer.host))
        else:
            _log.info("KV path ucx is not offered: %s", offer.reason)
    if transfer.path in ("auto", tcp.PATH):
        listeners.append(TcpListener(memory, identity, secret, host=transfer.host, tls=tls))
    return PoolReceiver(memory, listeners, landing=landing)


def make_sender(
    memory: SharedBlockMemory,
    identity: PeerIdentity,
    secret: bytes,
    transfer: TransferConfig,
    *,
    tls: Tls | None = None,
) -> RoutedSender:
    """The same for what is written. tls: of what leaves the host"""
    senders: dict[str, BlockSender] = {}
    left_out: dict[str, str] = {}
    if transfer.path in ("auto", shm.PATH):
        senders[shm.PATH] = ShmBlockSender(memory, identity, secret)
    if transfer.path in ("auto", ucx.PATH):
        offer = examine_ucx(transfer, has_tls=tls is not None)
        if offer.is_used:
            senders[ucx.PATH] = UcxBlockSender(memory, identity, secret, host=transfer.host)
        else:
            left_out[ucx.PATH] = offer.reason
    if transfer.path in ("auto", tcp.PATH):
        senders[tcp.PATH] = TcpBlockSender(memory, identity, secret, connections=transfer.tcp_connections, tls=tls)
    return RoutedSender(senders, left_out)
