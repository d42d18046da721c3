"""POST /v1/completions: what it has of its own."""

from __future__ import annotations

from collections.abc import Sequence

from pd_model.model_assets import ModelAssets
from router.completion_reply import CompletionEvents, whole_completion
from router.completion_request import CompletionCall, parse_completion
from router.prompt import PromptReader
from router.reply_parts import Answer, ReplyHead


class CompletionApi:
    name = "completion"
    id_prefix = "cmpl"
    prompt_field = "prompt"
    default_max_tokens: int | None = 16  # OpenAI's

    def __init__(self, assets: ModelAssets, reader: PromptReader) -> None:
        self._assets = assets
        self._reader = reader

    def parse(self, body: bytes) -> CompletionCall:
        return parse_completion(body, self._assets.name, self._assets.vocab_size)

    async def read_prompts(self, call: CompletionCall, max_tokens: int) -> list[list[int]]:
        texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
        return await self._reader.read_texts(texts, max_tokens) + [
            prompt for prompt in call.prompts if not isinstance(prompt, str)
        ]

    def whole(
        self,
        head: ReplyHead,
        answers: Sequence[Answer],
        usage: dict[str, int],
        prompt_ids: Sequence[Sequence[int]] | None,
    ) -> bytes:
        return whole_completion(head, answers, usage, prompt_ids)

    def events(self, head: ReplyHead, num_choices: int, *, is_usage_asked: bool) -> CompletionEvents:
        return CompletionEvents(head, num_choices=num_choices, is_usage_asked=is_usage_asked)
