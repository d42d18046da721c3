"""Callbacks of the event loop whose faults have an owner. The loop itself would log them and go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def guarded(callback: Callable[P, None], on_failure: Callable[[BaseException], None]) -> Callable[P, None]:
    """The callback; what it raises goes to `on_failure`, as with BackgroundTasks."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as fault:
            on_failure(fault)

    return run
