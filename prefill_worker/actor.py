"""The prefill worker as an actor."""

from __future__ import annotations

from kv_transport import shm, tcp
from kv_transport.choice import RoutedSender
from kv_transport.interface import BlockSender
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.engine import Engine
from pd_rpc.wire import PeerIdentity
from pd_worker.memory import PoolMemory
from pd_worker.worker_actor import WorkerActor
from prefill_worker.worker import PrefillWorker


class PrefillActor(WorkerActor):
    role = "prefill"

    def make_worker(self, engine: Engine, memory: PoolMemory) -> PrefillWorker:
        return PrefillWorker(
            name=self.name,
            incarnation=self.incarnation,
            secret=self.secret,
            config=self.config,
            engine=engine,
            memory=memory,
            transport=lambda _, identity: self._sender(memory, identity),
        )

    def _sender(self, memory: PoolMemory, identity: PeerIdentity) -> BlockSender:
        """Over the paths that the config allows; tickets list them best first."""
        senders: dict[str, BlockSender] = {}
        if self.config.transfer.path in ("auto", "shm"):
            senders[shm.PATH] = ShmBlockSender(memory, identity, self.secret)
        if self.config.transfer.path in ("auto", "tcp"):
            senders[tcp.PATH] = TcpBlockSender(memory, identity, self.secret)
        return RoutedSender(senders)
