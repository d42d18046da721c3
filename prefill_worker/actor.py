"""The prefill worker as an actor."""

from __future__ import annotations

from kv_transport.paths import make_sender
from pd_core.engine import Engine
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
            transport=lambda _, identity: make_sender(memory, identity, self.secret, self.config.transfer),
        )
