"""What every bench is given: the config to measure, how often, and ways to start clusters and engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from load_tests.clusters import ClusterStarter, RunningCluster
from load_tests.engine_client import EngineClient, engine_process
from load_tests.floor import ModelShape
from load_tests.prompts import PromptMaker
from load_tests.report import Check
from pd_core.config import Config

PROMPT_SEED = 20_240_607


@dataclass(frozen=True)
class Lab:
    """config: what is not a bench's own matter, the model above all; benches set pools, workers and paths
    num_rounds: how often everything is measured, alternating
    cores: all that the bench and its clusters may use
    shape: None for the fake engine
    prototype: folder of the kernel prototype to compare the engine with, if any
    notes: what the bench has found worth a sentence
    """

    config: Config
    num_rounds: int
    cores: Sequence[int]
    vocab_size: int
    shape: ModelShape | None
    cache_dir: Path
    prototype: Path | None
    clusters: ClusterStarter
    progress: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Something that whoever reads the figures has to know; one line of the report."""
        self.notes.append(sentence)

    def make_prompts(self) -> PromptMaker:
        return PromptMaker(self.vocab_size, PROMPT_SEED)

    def rounds(self) -> range:
        return range(self.num_rounds)

    @asynccontextmanager
    async def cluster(self, **sections: dict[str, Any]) -> AsyncIterator[RunningCluster]:
        """A cluster of the lab's config with these fields changed: `prefill={"num_workers": 0}`."""
        config = changed(self.config, **sections)
        async with self.clusters(config, self.progress) as running:
            yield running

    @asynccontextmanager
    async def engine(self, cores: Sequence[int], num_threads: int | None = None) -> AsyncIterator[EngineClient]:
        """The bare engine in a process of its own, tied to these cores; None is a thread for each."""
        self.progress(f"loading the bare engine on cores {', '.join(map(str, cores))}")
        async with engine_process(cores) as client:
            await client.load(self.config, num_threads or len(cores), self.cache_dir)
            yield client


class Bench(Protocol):
    """Something that can be measured. The module's docstring says what, how, and where the boundary lies."""

    name: str
    summary: str
    num_rounds: int

    async def run(self, lab: Lab) -> list[Check]:
        """Raises KvrelayError when it cannot come to its end."""
        ...


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with fields of its sections changed."""
    for name, fields in sections.items():
        section = msgspec.structs.replace(getattr(config, name), **fields)
        config = msgspec.structs.replace(config, **{name: section})
    return config
