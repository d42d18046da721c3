"""From the bytes of a body to typed fields, and from what is wrong with them to a sentence that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pd_core.errors import InvalidRequest

Fields = TypeVar("Fields", bound=msgspec.Struct)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest, also for a key that an object has twice."""
    try:
        tree = msgspec.json.decode(body)
        _check_keys(tree, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type(tree).__name__}")
    return tree


def check_fields(
    tree: Mapping[str, Any],
    taken: type[msgspec.Struct],
    harmless: frozenset[str],
    not_supported: Mapping[str, tuple[Any, ...]],
) -> None:
    """Raises InvalidRequest for a field that is unknown, or not supported and not off.

    not_supported: field, and its values that mean "off", besides null
    """
    for field, value in tree.items():
        if field in taken.__struct_fields__ or field in harmless:
            continue
        if field not in not_supported:
            raise InvalidRequest(f"unknown field {said(field)}", param=short(field))
        if value is not None and not any(_same(value, off) for off in not_supported[field]):
            raise InvalidRequest(f"{field} is not supported yet; leave it out", param=field)


def typed_fields(tree: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of `tree` that `kind` has. Raises InvalidRequest whose `param` is the path of the wrong one."""
    try:
        return msgspec.convert({field: tree[field] for field in kind.__struct_fields__ if field in tree}, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def short(word: str, num_chars: int = 100) -> str:
    """A client's own word, short enough to be said back to it."""
    return word if len(word) <= num_chars else word[: num_chars - 1] + "…"


def said(word: str) -> str:
    """The same in quotation marks; what is not printable counts as it is written."""
    quoted = repr(word[:101])
    return quoted if len(quoted) <= 102 else short(quoted, 101) + quoted[0]


_ESCAPED_COLON = re.compile(rb"\\u003a", re.IGNORECASE)


def _check_keys(tree: Any, body: bytes) -> None:
    """Refuses a key that an object has twice; the parser keeps the last one.

    Written anew the tree has as many colons as the body, unless a key and its value were lost: those in texts are the
    same on both sides. Only a body with fewer, or with a colon in disguise, is read a second time to find the key.
    """
    if not _ESCAPED_COLON.search(body) and msgspec.json.encode(tree).count(b":") == body.count(b":"):
        return
    # Numbers do not matter here, and Python would take long for a huge one.
    json.loads(body, object_pairs_hook=_unique, parse_int=len, parse_float=len, strict=False)


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len(dict(pairs)) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the key {said(key)} is given twice", param=short(key))
            seen.add(key)


_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_QUOTED = re.compile(r"([`'\"])(.*)\1", re.DOTALL)
_NAMED_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `([^`]*)`")


def _named(sentence: str) -> InvalidRequest:
    """msgspec says where it was; a field that is missing or unknown stands in its sentence instead."""
    path = match[1] if (match := _AT_PATH.search(sentence)) else ""
    what = _AT_PATH.sub("", sentence)
    if match := _NAMED_FIELD.match(what):
        path = f"{path}.{match[1]}" if path else match[1]
    path = short(path)
    what = _QUOTED.sub(lambda match: match[1] + short(match[2]) + match[1], what)
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _same(value: Any, off: Any) -> bool:
    """Equal, and of the same kind: True is not 1, nor is 1.0; but 1 may stand for 1.0."""
    return bool(value == off) and (type(value) is type(off) or (type(value), type(off)) == (int, float))
