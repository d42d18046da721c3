"""What the gateway needs of a model."""

from __future__ import annotations

from dataclasses import dataclass

from pd_model.chat import ChatTemplate
from pd_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelAssets:
    """Everything between text and token ids; no weights.

    name:           what clients call the model
    eos_token_ids:  any of them ends a text
    context_tokens: most positions of a sequence, prompt and answer together
    vocab_size:     ids of a request are below it
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    eos_token_ids: list[int]
    context_tokens: int
    vocab_size: int
