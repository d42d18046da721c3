"""A request as workers see it: token ids in, token ids out. Text is known to the gateway alone."""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.Enum):
    """Why a stream of tokens ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True):
    """How a token is drawn from logits.

    temperature: 0 is greedy: the highest logit, the lowest id among equals
    top_k:       0 is off
    min_p:       tokens less likely than min_p x the likeliest are out; 0 is off
    seed:        with the token's absolute position the whole state of the generator
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class GenerateRequest(msgspec.Struct, frozen=True):
    """One stream of tokens to make.

    request_id:     made by the router, unique in the cluster; never the client's
    tokens:         prompt ids, and in a continuation the ids already emitted after them
    max_tokens:     how many more tokens to make, >= 1
    first_index:    index of the next token in the client's stream; 0 unless this is a continuation
    stop_token_ids: a token that ends the stream; it is delivered with finish reason "stop"
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int] = []
    first_index: int = 0


def continue_request(request: GenerateRequest, emitted: list[int]) -> GenerateRequest:
    """The same stream, taken up after `emitted` tokens: preemption, retry and failover are all this.

    Draws depend on (seed, absolute position) alone, so whoever runs the new request gives the very tokens that the
    old one would have given. Raises ValueError when nothing is left to make.
    """
    if len(emitted) >= request.max_tokens:
        raise ValueError(f"{len(emitted)} of {request.max_tokens} tokens are emitted: nothing left to continue")
    return msgspec.structs.replace(
        request,
        tokens=[*request.tokens, *emitted],
        max_tokens=request.max_tokens - len(emitted),
        first_index=request.first_index + len(emitted),
    )


def finish_after(request: GenerateRequest, token: int, num_made: int) -> FinishReason | None:
    """Whether `token`, the `num_made`-th of this request, is its last, and why."""
    if token in request.stop_token_ids:
        return FinishReason.STOP
    if num_made >= request.max_tokens:
        return FinishReason.LENGTH
    return None
