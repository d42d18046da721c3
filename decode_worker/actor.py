"""The decode worker as an actor."""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from kv_transport.paths import make_receiver
from pd_core.engine import Engine
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
            transport=lambda _, identity: make_receiver(memory, identity, self.secret, self.config.transfer),
        )
