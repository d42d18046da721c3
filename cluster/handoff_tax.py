"""What a handoff adds to the wait for the second token, foretold from a path's speed and the prefill's. Pure."""

from __future__ import annotations

from pd_core.layout import blocks_for


def handoff_tax_s(
    num_tokens: int,
    *,
    chunk_tokens: int,
    block_bytes: int,
    prefill_tokens_per_s: float | None,
    bytes_per_s: float,
    latency_s: float,
) -> float:
    """Seconds from the end of the prefill until decode has all KV of a prompt of `num_tokens`.

    Chunks are computed one after the other, and each is sent when it is done and the one before it is through:

        done(i) = tokens up to the end of chunk i / prefill_tokens_per_s
        sent(i) = max(done(i), sent(i - 1)) + bytes of chunk i / bytes_per_s
        tax     = sent(last) - done(last) + latency_s

    Where the wire keeps up with the prefill that is the last chunk's wire time and the latency; where it does not, what
    is left of all the others comes on top. Without a prefill rate (None) the wire is taken to keep up: the least it is.
    latency_s: of a push of one block, from its call to the receiver's word
    """
    if num_tokens < 1 or chunk_tokens < 1:
        raise ValueError(f"a prompt of {num_tokens} tokens in chunks of {chunk_tokens}")
    sent_s = done_s = 0.0
    for start in range(0, num_tokens, chunk_tokens):
        end = min(start + chunk_tokens, num_tokens)
        wire_s = (blocks_for(end) - blocks_for(start)) * block_bytes / bytes_per_s
        done_s = sent_s if prefill_tokens_per_s is None else end / prefill_tokens_per_s
        sent_s = max(done_s, sent_s) + wire_s
    return sent_s - done_s + latency_s
