"""The decode worker as an actor."""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from kv_transport.interface import BlockReceiver
from kv_transport.receiver import PathListener, PoolReceiver
from kv_transport.shm_receiver import ShmListener
from kv_transport.tcp_receiver import TcpListener
from pd_core.engine import Engine
from pd_core.memory import BlockMemory
from pd_rpc.wire import PeerIdentity
from pd_worker.memory import PoolMemory
from pd_worker.worker_actor import WorkerActor


class DecodeActor(WorkerActor):
    role = "decode"

    def make_worker(self, engine: Engine, memory: PoolMemory) -> DecodeWorker:
        return DecodeWorker(
            name=self.name,
            incarnation=self.incarnation,
            secret=self.secret,
            config=self.config,
            engine=engine,
            memory=memory,
            transport=self._receiver,
        )

    def _receiver(self, memory: BlockMemory, identity: PeerIdentity) -> BlockReceiver:
        """Over the paths that the config allows, best first."""
        transfer = self.config.transfer
        listeners: list[PathListener] = []
        if transfer.path in ("auto", "shm"):
            listeners.append(ShmListener(memory, identity, self.secret))
        if transfer.path in ("auto", "tcp"):
            listeners.append(TcpListener(memory, identity, self.secret, host=transfer.host))
        return PoolReceiver(memory, listeners)
