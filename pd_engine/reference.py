"""One request alone in one process: what every other way of running it is compared with. Tests use it."""

from __future__ import annotations

from collections.abc import Sequence

from pd_core.engine import Engine, SequenceStep
from pd_core.errors import EngineError
from pd_core.request import GenerateRequest, finish_after
from pd_engine.steps import never


def generate_alone(engine: Engine, request: GenerateRequest, chunk_tokens: int, block_ids: Sequence[int]) -> list[int]:
    """The tokens that `request` gives when nothing else runs: chunked prefill from position 0, then decode.

    chunk_tokens: most tokens of a prefill chunk; chunks start at its multiples
    block_ids:    blocks to use; whatever is in them is overwritten
    Raises EngineError when the request does not fit the blocks or the context.
    """
    token = _prefill(engine, request, chunk_tokens, block_ids)
    made = [token]
    while finish_after(request, token, len(made)) is None:
        step = SequenceStep([token], len(request.tokens) + len(made) - 1, block_ids, request.sampling)
        token = _drawn(engine, step)
        made.append(token)
    return made


def _prefill(engine: Engine, request: GenerateRequest, chunk_tokens: int, block_ids: Sequence[int]) -> int:
    tokens = request.tokens
    last_start = (len(tokens) - 1) // chunk_tokens * chunk_tokens
    for start in range(0, last_start, chunk_tokens):
        engine.step([SequenceStep(tokens[start : start + chunk_tokens], start, block_ids, None)], never)
    return _drawn(engine, SequenceStep(tokens[last_start:], last_start, block_ids, request.sampling))


def _drawn(engine: Engine, step: SequenceStep) -> int:
    (token,) = engine.step([step], never)
    if token is None:
        raise EngineError("the engine drew no token for a step that asks for one")
    return token
