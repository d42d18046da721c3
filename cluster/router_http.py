"""What commands ask of a running cluster's router, over HTTP: one question, one answer, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from pd_core.errors import ConfigError, Unavailable

MAX_REPLY_BYTES = 4 << 20
READ_BYTES = 64 << 10


class Reply(NamedTuple):
    status: int
    body: bytes


def ask_router(
    url: str,
    target: str,
    *,
    deadline_s: float,
    silence_s: float | None = None,
    post: bytes | None = None,
    on_line: Callable[[bytes], None] = lambda _: None,
) -> Reply:
    """The router's answer to a GET of `target`, or to a POST of this JSON.

    deadline_s: for all of it; silence_s: the longest time between two pieces of the answer
    on_line: given each line of the body that is not empty, as soon as it is there
    Raises ConfigError when `url` is none; Unavailable, naming it, when nobody answers in time or who does is no router.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
        if parts.scheme != "http" or not host:
            raise ValueError("it is not like http://127.0.0.1:8000")
        question = _question(host, port, parts.path.rstrip("/") + target, post)
        return asyncio.run(_ask_within(host, port, question, on_line, deadline_s, silence_s))
    except ValueError as error:  # also of a host that cannot be a name at all
        raise ConfigError(f"--url {url!r}: {error}", param="url") from error
    except _Silence as error:
        raise Unavailable(f"{url} has said nothing for {silence_s:g} s") from error
    except TimeoutError as error:
        raise Unavailable(f"{url} gave no answer within {deadline_s:g} s") from error
    except OSError as error:
        raise Unavailable(f"no kvrelay answers on {url}: {error.strerror or error}. Is it running?") from error
    except httptools.HttpParserError as error:
        raise Unavailable(f"what answers on {url} does not speak HTTP: {error}") from error


def _question(host: str, port: int, target: str, post: bytes | None) -> bytes:
    name = f"[{host}]" if ":" in host else host
    head = f"{'GET' if post is None else 'POST'} {target} HTTP/1.1\r\nhost: {name}:{port}\r\nconnection: close\r\n"
    if post is None:
        return f"{head}\r\n".encode()
    return f"{head}content-type: application/json\r\ncontent-length: {len(post)}\r\n\r\n".encode() + post


class _Silence(TimeoutError):
    """Nothing came for `silence_s`."""


async def _ask_within(
    host: str,
    port: int,
    question: bytes,
    on_line: Callable[[bytes], None],
    deadline_s: float,
    silence_s: float | None,
) -> Reply:
    async with asyncio.timeout(deadline_s):
        return await _ask(host, port, question, on_line, silence_s)


async def _read(reader: asyncio.StreamReader, silence_s: float | None) -> bytes:
    try:
        async with asyncio.timeout(silence_s) as bound:
            return await reader.read(READ_BYTES)
    except TimeoutError as error:  # the kernel's own is one too
        if bound.expired():
            raise _Silence from error
        raise


async def _ask(
    host: str, port: int, question: bytes, on_line: Callable[[bytes], None], silence_s: float | None
) -> Reply:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(question)
        reply = _Reply()
        parser = httptools.HttpResponseParser(reply)
        while not reply.is_complete:
            data = await _read(reader, silence_s)
            if not data:
                raise ConnectionResetError("the connection was closed before the answer was complete")
            parser.feed_data(data)
            for line in reply.take_lines():
                on_line(line)
            if len(reply.body) > MAX_REPLY_BYTES:
                raise Unavailable(f"the answer is longer than {MAX_REPLY_BYTES} bytes")
        return Reply(parser.get_status_code(), bytes(reply.body))
    finally:
        writer.transport.abort()  # closing gently would wait for a peer that may be mute


class _Reply:
    """What the parser calls."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self._line_starts = 0

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    def take_lines(self) -> list[bytes]:
        """Those that have become whole since the last call; of a complete body also what follows the last of them."""
        end = len(self.body) if self.is_complete else self.body.rfind(b"\n") + 1
        lines = bytes(self.body[self._line_starts : end]).split(b"\n")
        self._line_starts = max(end, self._line_starts)
        return [line for line in lines if line]
