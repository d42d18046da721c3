"""Two-turn questions: the public set where the trace folder is there, a small one of our own where it is not."""

from __future__ import annotations

from pathlib import Path

import msgspec

_OURS = Path(__file__).parent / "data" / "two_turn_questions.jsonl"
_PUBLIC = "mt_bench_question.jsonl"


class Question(msgspec.Struct, frozen=True):
    question_id: int
    turns: list[str]


def load_questions(traces: Path | None, limit: int | None = None) -> list[Question]:
    """The first `limit` questions (all when None), spread over the whole set."""
    path = traces / _PUBLIC if traces and (traces / _PUBLIC).is_file() else _OURS
    questions = [msgspec.json.decode(line, type=Question) for line in path.read_bytes().splitlines() if line]
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]
