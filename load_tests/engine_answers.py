"""Each question of `engine_messages` with who answers it."""

from __future__ import annotations

from load_tests.engine_messages import (
    Answer,
    Generate,
    Generated,
    Load,
    MeasureRate,
    Question,
    Rate,
    Refused,
    TimeDecode,
    TimePrefill,
    Took,
)
from load_tests.engine_work import EngineWork
from load_tests.machine_rates import MachineRates
from pd_core.errors import EngineError, KvrelayError


class EngineAnswers:
    """One engine, from its `Load` on, and the machine's rates."""

    def __init__(self) -> None:
        self._work: EngineWork | None = None
        self._rates = MachineRates()

    def to(self, question: Question) -> Answer:
        """The answer; an error of ours, or a question that makes no sense, becomes a Refused."""
        try:
            return self._answer(question)
        except (KvrelayError, ValueError) as error:
            return Refused(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._work is not None:
            self._work.close()

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, Load):
            self._work = EngineWork(question)
            return self._work.loaded()
        if isinstance(question, MeasureRate):
            return Rate(self._rates.measure(question))
        if self._work is None:
            raise EngineError("no engine has been loaded")
        match question:
            case TimePrefill():
                return Took(self._work.time_prefill(question))
            case TimeDecode():
                return Took(self._work.time_decode(question))
            case Generate():
                return Generated(self._work.generate(question))
