"""Rebuilds a tokenizer from what GGUF keeps of it: tokens, their types, and merges (byte-level BPE) or scores
(SentencePiece's BPE).

GGUF names the pre-tokenizer of byte-level BPE instead of storing it. Each name stands for rules that have to be known
here; a name that is not known is refused, because a guess would give other ids than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pd_core.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""GGUF's token types: control tokens are never part of a text; those that users defined are matched before all else."""

WORD_BOUNDARY = "\u2581"
"""What SentencePiece writes for a space."""

_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = _GPT4_WORDS.format(digits=r"\p{N}")
LLAMA3_WORDS = _GPT4_WORDS.format(digits=r"\p{N}{1,3}")

PreTokenizer = pre_tokenizers.PreTokenizer


def _byte_level() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _words(pattern: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


@dataclass(frozen=True)
class ByteLevelRules:
    """What one value of tokenizer.ggml.pre stands for.

    pre_tokenizer:  makes it
    nfc:            texts are put into Unicode's composed form first
    ignores_merges: a word that is a token is that token, whatever the merges would make of it
    puts_bos:       texts begin with the bos token where the file does not say
    """

    pre_tokenizer: Callable[[], PreTokenizer]
    nfc: bool = False
    ignores_merges: bool = False
    puts_bos: bool = False


BYTE_LEVEL_RULES: dict[str, ByteLevelRules] = {
    "gpt-2": ByteLevelRules(_byte_level),
    "smollm": ByteLevelRules(_smollm),
    "qwen2": ByteLevelRules(_words(QWEN2_WORDS), nfc=True),
    "llama-bpe": ByteLevelRules(_words(LLAMA3_WORDS), ignores_merges=True, puts_bos=True),
}


def tokenizer_json_from_gguf(values: Mapping[str, Any]) -> str:
    """The tokenizer as the `tokenizers` library's JSON. Raises ModelError for kinds that are not served."""
    return _GgufTokenizer(values).build()


class _GgufTokenizer:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def build(self) -> str:
        match self._get("model"):
            case "gpt2":
                tokenizer = self._byte_level_bpe()
            case "llama":
                tokenizer = self._sentencepiece()
            case kind:
                raise ModelError(
                    f"the GGUF file has tokenizer.ggml.model {kind!r}; served are 'gpt2' (byte-level BPE) and "
                    "'llama' (SentencePiece)"
                )
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, kind in zip(self._get("tokens"), self._get("token_type"), strict=True)
                if kind in (UNKNOWN, CONTROL, USER_DEFINED)
            ]
        )
        return str(tokenizer.to_str())

    def _byte_level_bpe(self) -> Tokenizer:
        name = self._get("pre")
        if name not in BYTE_LEVEL_RULES:
            raise ModelError(
                f"the GGUF file has tokenizer.ggml.pre {name!r}; pre-tokenizers that are known: "
                f"{', '.join(BYTE_LEVEL_RULES)}"
            )
        rules = BYTE_LEVEL_RULES[name]
        tokens = self._tokens("merges")
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in self._get("merges"))]
        tokenizer = Tokenizer(_bpe(tokens, pairs, ignore_merges=rules.ignores_merges))
        if rules.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = rules.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        self._put_bos(tokenizer, rules.puts_bos)
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        if self._get("precompiled_charsmap") or self._get("remove_extra_whitespaces"):
            raise ModelError("the GGUF file's tokenizer rewrites its text before it splits it; that is not served")
        tokens = self._tokens("scores")
        tokenizer = Tokenizer(
            _bpe(tokens, self._merges_by_score(tokens), unk_token=self._unknown(), fuse_unk=True, byte_fallback=True)
        )
        spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", WORD_BOUNDARY)]
        if self._get("add_space_prefix") is not False:
            spaces.insert(0, normalizers.Prepend(WORD_BOUNDARY))
        tokenizer.normalizer = normalizers.Sequence(spaces)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        self._put_bos(tokenizer, by_default=True)
        return tokenizer

    def _merges_by_score(self, tokens: list[str]) -> list[tuple[str, str]]:
        """Every way to make a piece out of two others, best score first: the order in which SentencePiece joins.

        (Of two ways to make the same piece SentencePiece takes the one further left in the text, BPE the one that
        stands first here: as the tokenizers library converts such models everywhere.)
        """
        types, scores = self._get("token_type"), self._get("scores")
        score_of = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
        ways = [
            (-score, -cut, piece[:cut], piece[cut:])
            for piece, score in score_of.items()
            for cut in range(1, len(piece))
            if piece[:cut] in score_of and piece[cut:] in score_of
        ]
        ways.sort(key=lambda way: way[:2])
        return [(left, right) for _, _, left, right in ways]

    def _unknown(self) -> str | None:
        tokens, types = self._get("tokens"), self._get("token_type")
        return next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)

    def _put_bos(self, tokenizer: Tokenizer, by_default: bool) -> None:
        bos, puts = self._get("bos_token_id"), self._get("add_bos_token")
        if bos is None or not (by_default if puts is None else puts):
            return
        tokens = self._get("tokens")
        if not 0 <= bos < len(tokens):
            raise ModelError(f"the GGUF file has tokenizer.ggml.bos_token_id {bos} and {len(tokens)} tokens")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )

    def _tokens(self, *needed: str) -> list[str]:
        """The tokens, when they and what is needed of them are there and fit together."""
        keys = ("tokens", "token_type", *needed)
        if missing := [key for key in keys if self._get(key) is None]:
            raise ModelError(f"the GGUF file's tokenizer lacks {', '.join(missing)}")
        tokens: list[str] = self._get("tokens")
        if any(len(self._get(key)) != len(tokens) for key in keys if key != "merges") or len(set(tokens)) < len(tokens):
            raise ModelError("the GGUF file's tokens are not distinct, or not each of them has a type and a score")
        return tokens

    def _get(self, key: str) -> Any:
        return self._values.get(f"tokenizer.ggml.{key}")


def _bpe(tokens: list[str], pairs: list[tuple[str, str]], **options: Any) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=pairs, **options)
    except Exception as error:  # the library raises bare Exception, for merges of tokens that do not exist
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}") from error
