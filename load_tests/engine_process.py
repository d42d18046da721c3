"""The program of an engine process: `python -m load_tests.engine_process 0,1` (the cores that it is tied to).

It reads questions from standard input, one a line, and answers each on standard output. It ends with its input, so it
never outlives the bench. What libraries print goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec

from load_tests.engine_messages import Answer, Question


class Answers(Protocol):
    """Whoever answers; never raises for a question that it can read."""

    def to(self, question: Question) -> Answer: ...

    def close(self) -> None:
        """There are no more questions."""
        ...


def serve(make_answers: Callable[[], Answers]) -> None:
    """Ties this process to the cores of its first argument, and answers until its input ends.

    make_answers: called after that, because numpy and torch count the cores when they are imported
    """
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers = make_answers()
    decoder: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
    for line in sys.stdin.buffer:
        output.write(msgspec.json.encode(answers.to(decoder.decode(line))) + b"\n")
        output.flush()
    answers.close()


def _engine_answers() -> Answers:
    from load_tests.engine_answers import EngineAnswers  # noqa: PLC0415 - torch: see serve

    return EngineAnswers()


if __name__ == "__main__":
    serve(_engine_answers)
