"""Two-turn conversations as clients have them, with the ids that went in and came out, and the same by REF."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx
from questions import Question

from pd_core.layout import DType
from pd_core.request import GenerateRequest, SamplingParams
from pd_engine.loader import load_engine, plan_engine
from pd_engine.reference import generate_alone
from pd_model.assets import assets_of
from pd_model.folder import ModelFolder, default_cache_dir
from pd_worker.memory import PoolMemory

CHUNK_TOKENS = 96
"""For REF: another chunk size than the cluster's, because it must not matter."""
TURN_S = 900.0
"""All conversations begin within seconds, so the last in line waits for nearly all the others' answers."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.02, seed=20_177),
}


@dataclass(frozen=True)
class Turn:
    """One request and its answer. max_tokens: what it asked for."""

    name: str
    prompt_ids: list[int]
    max_tokens: int
    token_ids: list[int]
    sampling: SamplingParams
    finish_reason: str
    usage: dict[str, int]


class Client:
    """Holds conversations with a server, all at once, each beginning at a random moment."""

    def __init__(self, url: str, folder: ModelFolder, seed: int, spread_s: float, max_tokens: int) -> None:
        """spread_s: within this time every conversation begins, and each waits so long at most between its turns."""
        self._url = url
        self._assets = assets_of(folder)
        self._chance = random.Random(seed)
        self._spread_s = spread_s
        self._max_tokens = max_tokens

    async def hold_all(self, questions: list[Question]) -> list[Turn]:
        limits = httpx.Limits(max_connections=2 * len(questions))
        async with httpx.AsyncClient(base_url=self._url, timeout=TURN_S, limits=limits) as http:
            talks = [
                self._hold(http, question, kind, self._chance.uniform(0, self._spread_s))
                for question in questions
                for kind in SAMPLINGS
            ]
            return [turn for turns in await asyncio.gather(*talks) for turn in turns]

    async def _hold(self, http: httpx.AsyncClient, question: Question, kind: str, pause_s: float) -> list[Turn]:
        messages: list[dict[str, str]] = []
        turns = []
        for number, text in enumerate(question.turns, 1):
            await asyncio.sleep(pause_s)
            messages.append({"role": "user", "content": text})
            body = await self._ask(http, messages, SAMPLINGS[kind])
            choice = body["choices"][0]
            expected = self._assets.tokenizer.encode(self._assets.chat_template.render(messages))
            assert body["prompt_token_ids"] == expected
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            turns.append(
                Turn(
                    f"question {question.question_id} turn {number} {kind}",
                    body["prompt_token_ids"],
                    self._max_tokens,
                    choice["token_ids"],
                    SAMPLINGS[kind],
                    choice["finish_reason"],
                    body["usage"],
                )
            )
        return turns

    async def _ask(
        self, http: httpx.AsyncClient, messages: list[dict[str, str]], sampling: SamplingParams
    ) -> dict[str, Any]:
        request = {
            "model": self._assets.name,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "return_token_ids": True,
        }
        reply = await http.post("/v1/chat/completions", json=request)
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body


class References:
    """What one process alone makes of requests: the same engine, one request at a time, each computed once."""

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self._known: dict[tuple[DType, str, tuple[int, ...], int, SamplingParams], list[int]] = {}

    def alone(self, turns: list[Turn], dtype: DType, kernels: str) -> list[list[int]]:
        """The ids for each turn's prompt."""
        keys = [(dtype, kernels, tuple(turn.prompt_ids), turn.max_tokens, turn.sampling) for turn in turns]
        missing = {key: turn for key, turn in zip(keys, turns, strict=True) if key not in self._known}
        if missing:
            self._known |= zip(missing, self._compute(list(missing.values()), dtype, kernels), strict=True)
        return [self._known[key] for key in keys]

    def _compute(self, turns: list[Turn], dtype: DType, kernels: str) -> list[list[int]]:
        num_blocks = 1 + max(len(turn.prompt_ids) + turn.max_tokens for turn in turns) // 16
        plan = plan_engine(self.folder, dtype, default_cache_dir(), kernels)
        memory = PoolMemory(num_blocks, plan.layout.block_bytes)
        engine = load_engine(plan, memory, num_threads=2)
        stops = self.folder.manifest.eos_token_ids
        requests = [
            GenerateRequest("alone", turn.prompt_ids, turn.max_tokens, turn.sampling, stop_token_ids=stops)
            for turn in turns
        ]
        made = [generate_alone(engine, request, CHUNK_TOKENS, range(num_blocks)) for request in requests]
        del engine
        memory.close()
        return made

    def check(self, turns: list[Turn], dtype: DType, kernels: str) -> None:
        """Every turn has the ids of one process alone, and a usage and a reason that fit them."""
        stops = self.folder.manifest.eos_token_ids
        for turn, alone in zip(turns, self.alone(turns, dtype, kernels), strict=True):
            assert turn.token_ids == alone, turn.name
            assert turn.usage["prompt_tokens"] == len(turn.prompt_ids)
            assert turn.usage["completion_tokens"] == len(alone)
            assert turn.finish_reason == ("stop" if alone[-1] in stops else "length"), turn.name
