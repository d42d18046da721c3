"""The prefill worker as an actor."""

from __future__ import annotations

from kv_transport.choice import RoutedSender
from kv_transport.interface import BlockSender
from kv_transport.tcp import PATH
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.engine import Engine
from pd_core.memory import BlockMemory
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
            transport=self._sender,
        )

    def _sender(self, memory: BlockMemory, identity: PeerIdentity) -> BlockSender:
        return RoutedSender({PATH: TcpBlockSender(memory, identity, self.secret)})
