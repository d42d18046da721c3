"""How a tokenizer's vocabulary writes the bytes that its tokens stand for.

byte-level      "\u0120the"   each character is a byte: printable Latin-1 as itself, the others from U+0100 on
SentencePiece   "▁the"   characters as they are, a space as U+2581, and <0xE2> for one byte of a rare character
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from pd_core.errors import ModelError
from pd_model.gguf_tokenizer import WORD_BOUNDARY

TokenForm: TypeAlias = Literal["byte-level", "sentencepiece"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def form_of(tree: Mapping[str, Any]) -> TokenForm:
    """The form of a tokenizer, by its JSON. Raises ModelError naming what is not served."""
    model, decoder = tree.get("model") or {}, tree.get("decoder") or {}
    if model.get("type") != "BPE":
        raise ModelError(f"the tokenizer's model is {model.get('type')!r}; only 'BPE' is served")
    if decoder.get("type") == "ByteLevel":
        return "byte-level"
    steps = decoder.get("decoders") or [] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    # the Strip step takes off the space that is put in front of a text: a stream's pieces have to keep theirs
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]) and _gives_spaces(steps[0]):
        return "sentencepiece"
    named = " + ".join(map(str, kinds))
    raise ModelError(f"the tokenizer's decoder is {named}; served are 'ByteLevel' and SentencePiece's")


def byte_writer(form: TokenForm) -> Callable[[str], bytes]:
    """Gives the bytes of a token (not of a special one) as the vocabulary writes it."""
    return _ByteLevel() if form == "byte-level" else _piece_bytes


def written_bytes() -> list[str]:
    """How byte-level BPE writes each byte: printable Latin-1 as itself, the others in order from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    written, next_free = [], 0x100
    for byte in range(256):
        if byte in printable:
            written.append(chr(byte))
        else:
            written.append(chr(next_free))
            next_free += 1
    return written


class _ByteLevel:
    def __init__(self) -> None:
        self._byte_of = {written: byte for byte, written in enumerate(written_bytes())}

    def __call__(self, written: str) -> bytes:
        if all(character in self._byte_of for character in written):
            return bytes(self._byte_of[character] for character in written)
        return written.encode()  # put in by hand, and written as it is


def _piece_bytes(written: str) -> bytes:
    if byte := _BYTE.fullmatch(written):
        return bytes([int(byte[1], 16)])
    return written.replace(WORD_BOUNDARY, " ").encode()


def _gives_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": WORD_BOUNDARY} and step.get("content") == " "
