"""What the shell of a request needs of the router around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from pd_core.transfer import PathTransfer
from router.legs import WorkerStream
from router.view import WorkerRef

RunT_contra = TypeVar("RunT_contra", contravariant=True)
"""The shell of a request."""


class RunHost(Protocol[RunT_contra]):
    """All of it returns at once."""

    def now_s(self) -> float: ...

    def ref_of(self, worker: str) -> WorkerRef: ...

    def open_stream(self, ref: WorkerRef, body: msgspec.Struct, deadline_s: float) -> WorkerStream:
        """Raises WorkerLost when there is no connection to this boot."""
        ...

    def leg_opened(self, task: asyncio.Task[None]) -> None: ...

    def leg_admitted(self, ref: WorkerRef, work_id: str) -> None:
        """The worker has taken the leg's blocks."""
        ...

    def prompt_computed(self, ref: WorkerRef, work_id: str, num_prompt: int) -> None:
        """The first token has come from the worker that computes the prompt."""
        ...

    def leg_preempted(self, ref: WorkerRef, work_id: str) -> None:
        """The leg's blocks were given to older ones."""
        ...

    def leg_resumed(self, ref: WorkerRef, work_id: str) -> None:
        """After it was preempted, the leg has brought a token again."""
        ...

    def progress_s(self, ref: WorkerRef) -> float:
        """When this boot was last heard to have run more tokens than before."""
        ...

    def leg_over(self, ref: WorkerRef, work_id: str, num_made: int, task: asyncio.Task[None] | None) -> None:
        """Nothing of this attempt is on that worker any more.

        num_made: tokens of the answer so far; task: None when the leg was never opened
        """
        ...

    def turn_given_back(self, run: RunT_contra, refused_by: WorkerRef) -> None: ...

    def token_given(self, gap_s: float | None) -> None:
        """gap_s: see Observer"""
        ...

    def kv_sent(self, transfers: Sequence[PathTransfer]) -> None:
        """What the prefill worker says that it sent; it may say so after the request is over."""
        ...

    def run_over(self, run: RunT_contra) -> None: ...
