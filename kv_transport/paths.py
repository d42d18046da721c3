"""The paths by which a worker's pool is written to and writes to others, put together in one place, best first."""

from __future__ import annotations

from kv_transport import shm, tcp
from kv_transport.choice import RoutedSender
from kv_transport.interface import BlockReceiver, BlockSender
from kv_transport.receiver import PathListener, PoolReceiver
from kv_transport.shm_pool import SharedBlockMemory
from kv_transport.shm_receiver import ShmListener
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.tcp_receiver import TcpListener
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.config import TransferConfig
from pd_rpc.wire import PeerIdentity


def make_receiver(
    memory: SharedBlockMemory, identity: PeerIdentity, secret: bytes, transfer: TransferConfig
) -> BlockReceiver:
    """Over the paths that the config allows; its tickets name them best first."""
    listeners: list[PathListener] = []
    if transfer.path in ("auto", shm.PATH):
        listeners.append(ShmListener(memory, identity, secret))
    if transfer.path in ("auto", tcp.PATH):
        listeners.append(TcpListener(memory, identity, secret, host=transfer.host))
    return PoolReceiver(memory, listeners)


def make_sender(
    memory: SharedBlockMemory, identity: PeerIdentity, secret: bytes, transfer: TransferConfig
) -> BlockSender:
    """Over the paths that the config allows."""
    senders: dict[str, BlockSender] = {}
    if transfer.path in ("auto", shm.PATH):
        senders[shm.PATH] = ShmBlockSender(memory, identity, secret)
    if transfer.path in ("auto", tcp.PATH):
        senders[tcp.PATH] = TcpBlockSender(memory, identity, secret)
    return RoutedSender(senders)
