"""What a client may ask of both endpoints that generate text, and what it comes to.

Fields of OpenAI's API fall into four kinds:

    taken        AskedFields below, and those that an endpoint adds; beside OpenAI's: top_k, min_p, ignore_eos,
                 return_token_ids
    harmless     HARMLESS: they do not change the answer; accepted and not used
    not yet      NOT_SUPPORTED: they would change it; accepted with a value that means "off", else refused by name
    unknown      refused by name

Nothing is dropped in silence. Where OpenAI has a default it is ours: temperature 1.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pd_core.errors import InvalidRequest, UnknownModel
from pd_core.request import SamplingParams
from router.json_body import said

NUM_SEEDS = 2**63
"""Seeds of the sampler are 0 .. 2**63 - 1; a negative one of the client's is counted from the end."""
MAX_CHOICES = 64
"""Of one request: `n` for each of its prompts. Each is a stream of tokens of its own."""
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_obfuscation is OpenAI's padding against traffic analysis; it does not change the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


TokenLimit = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class AskedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that are taken everywhere, with their limits. null is the same as absent."""

    model: str
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "response_format": ({"type": "text"},),
}
"""Field: values that mean "off", besides null. A whole number is one; a fraction may be written as either."""


class Options(msgspec.Struct, frozen=True):
    """How to answer.

    max_tokens:     None leaves it to the endpoint
    sampling:       its seed is not set yet; see `seed`
    seed:           None when the client has none: then every prompt gets a random one
    num_choices:    answers to each prompt
    stops:          the text ends before the leftmost of them
    with_usage:     a stream ends with a usage chunk
    with_token_ids: the reply says which ids prompt and text are made of
    """

    max_tokens: int | None
    sampling: SamplingParams
    seed: int | None
    num_choices: int
    stops: list[str]
    is_stream: bool
    with_usage: bool
    with_token_ids: bool
    ignores_eos: bool


def options_of(asked: AskedFields, max_tokens: int | None) -> Options:
    """What the fields mean together. Raises InvalidRequest when they contradict each other."""
    num_choices = 1 if asked.n is None else asked.n
    if asked.best_of is not None and asked.best_of != num_choices:
        raise InvalidRequest(
            f"best_of is {asked.best_of} and n is {num_choices}: making more answers than are given out is not "
            "supported yet; leave best_of out",
            param="best_of",
        )
    return Options(
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(asked.top_k or 0, 0),
            min_p=asked.min_p or 0.0,
        ),
        seed=None if asked.seed is None else asked.seed % NUM_SEEDS,
        num_choices=num_choices,
        stops=_stops(asked.stop),
        is_stream=bool(asked.stream),
        with_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        with_token_ids=bool(asked.return_token_ids),
        ignores_eos=bool(asked.ignore_eos),
    )


def _stops(asked: str | list[str] | None) -> list[str]:
    """Raises InvalidRequest for too many, and for one that is empty or too long."""
    if asked is None:
        return []
    stops = [asked] if isinstance(asked, str) else asked
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            name = "stop" if isinstance(asked, str) else f"stop[{index}]"
            why = f"{name} has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}"
            raise InvalidRequest(why, param="stop")
    return stops


def check_model(asked: str, served: str) -> None:
    """Raises UnknownModel unless this model is the one that is served."""
    if asked != served:
        raise UnknownModel(f"the model {said(asked)} is not served here; {served!r} is", param="model")
