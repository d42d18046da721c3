"""POST /v1/chat/completions: what it has of its own."""

from __future__ import annotations

from collections.abc import Sequence

from pd_model.model_assets import ModelAssets
from router.chat_reply import ChatEvents, whole_chat
from router.chat_request import ChatCall, parse_chat
from router.prompt import PromptReader
from router.reply_parts import Answer, ReplyHead


class ChatApi:
    name = "chat"
    id_prefix = "chatcmpl"
    prompt_field = "messages"
    default_max_tokens: int | None = None

    def __init__(self, assets: ModelAssets, reader: PromptReader) -> None:
        self._model = assets.name
        self._reader = reader

    def parse(self, body: bytes) -> ChatCall:
        return parse_chat(body, self._model)

    async def read_prompts(self, call: ChatCall, max_tokens: int) -> list[list[int]]:
        return [await self._reader.read_chat(call.messages, max_tokens)]

    def whole(
        self,
        head: ReplyHead,
        answers: Sequence[Answer],
        usage: dict[str, int],
        prompt_ids: Sequence[Sequence[int]] | None,
    ) -> bytes:
        return whole_chat(head, answers, usage, None if prompt_ids is None else prompt_ids[0])

    def events(self, head: ReplyHead, num_choices: int, *, is_usage_asked: bool) -> ChatEvents:
        return ChatEvents(head, num_choices=num_choices, is_usage_asked=is_usage_asked)
