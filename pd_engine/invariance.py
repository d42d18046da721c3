"""The engine's proof, at start and on its real weights, that a row's bits depend on its own sequence alone.

One prompt, past 512 positions, is run whole. Then parts of it are run again: in chunks of other sizes, token by token,
together with other sequences, with one thread and with all. Every byte of KV and every logit must be the same. A few
layers are enough, because all layers multiply the same shapes. The outcome is kept in the cache folder by numerics id,
weights and threads, so that a second start only looks it up.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.layout import BLOCK_TOKENS, blocks_for
from pd_core.memory import BlockMemory
from pd_engine.philox import uniform

PROOF_VERSION = 2
PROMPT_TOKENS = 560
NUM_LAYERS = 4
FRONT_CHUNKS = (5, 16, 1, 42)
TAIL_CHUNKS = (1, 1, 3, 16, 1)
NEIGHBOUR_TOKENS = (1, 2, 17, 1, 9)
NUM_BLOCKS = 2 * blocks_for(PROMPT_TOKENS) + 2 * len(NEIGHBOUR_TOKENS)
"""What a trial's pool must have."""


class Shallow(Protocol):
    """The first layers of an engine (NUM_LAYERS of them) over a pool of its own (NUM_BLOCKS blocks)."""

    @property
    def memory(self) -> BlockMemory: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    def run(self, steps: Sequence[SequenceStep], num_threads: int) -> NDArray[np.float32]:
        """Runs the steps with so many threads; logits of the first step's last token."""
        ...


class InvarianceProof(msgspec.Struct, frozen=True):
    """What was proved.

    numerics: numerics id that it holds for
    weights:  digest of the weights
    threads:  numbers of threads that were tried
    failure:  None when all was bit-equal, else what was not
    """

    numerics: str
    weights: str
    threads: list[int]
    failure: str | None

    def report(self) -> dict[str, str]:
        """For `/ready`'s detail."""
        kept = self.failure is None
        promise = "bit-exact" if kept else f"same distribution only: {self.failure}"
        return {
            "numerics": self.numerics,
            "invariance": promise,
            "threads_tried": ", ".join(map(str, self.threads)),
        }


def proven(
    make_shallow: Callable[[], Shallow], numerics: str, weights: str, num_threads: int, cache_dir: Path
) -> InvarianceProof:
    """The proof for this engine: looked up, or made (within a second for a small model) and kept."""
    threads = sorted({1, num_threads})
    key = msgspec.json.encode([PROOF_VERSION, numerics, weights, threads])
    path = cache_dir / "invariance" / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.json"
    known = _read(path)
    if known is not None and (known.numerics, known.weights, known.threads) == (numerics, weights, threads):
        return known
    proof = InvarianceProof(numerics, weights, threads, find_variance(make_shallow(), threads))
    _write(path, proof)
    return proof


def find_variance(shallow: Shallow, threads: Sequence[int]) -> str | None:
    """None when every way of running the prompt gives the same bits, else a sentence about the first that does not."""
    return _Trial(shallow).run(threads)


class _Trial:
    """whole and again are two block tables for the prompt; neighbours have blocks of their own."""

    def __init__(self, shallow: Shallow) -> None:
        num_tokens = min(PROMPT_TOKENS, shallow.context_tokens)
        self.shallow = shallow
        self.tokens = [int(uniform(0, position) * shallow.vocab_size) for position in range(num_tokens)]
        num_blocks = blocks_for(num_tokens)
        self.whole = range(num_blocks)
        self.again = range(num_blocks, 2 * num_blocks)
        self.others = [range(2 * num_blocks + 2 * i, 2 * num_blocks + 2 * i + 2) for i in range(len(NEIGHBOUR_TOKENS))]

    def run(self, threads: Sequence[int]) -> str | None:
        expected = self.shallow.run([self._step(0, len(self.tokens), self.whole)], max(threads))
        tail = max(0, len(self.tokens) - sum(TAIL_CHUNKS)) // BLOCK_TOKENS * BLOCK_TOKENS
        for num_threads in threads:
            words = f"with {num_threads} thread" + ("s" if num_threads > 1 else "")
            self._run_chunks(0, FRONT_CHUNKS, num_threads)
            if not self._kv_equal(min(sum(FRONT_CHUNKS), len(self.tokens))):
                return f"KV of chunks {FRONT_CHUNKS} differs from the whole prompt's, {words}"
            for whole, again in zip(self.whole, self.again, strict=True):
                self.shallow.memory.block(again)[:] = self.shallow.memory.block(whole)
            got = self._run_chunks(tail, [*TAIL_CHUNKS, len(self.tokens) - tail - sum(TAIL_CHUNKS)], num_threads)
            if not self._kv_equal(len(self.tokens)):
                return f"KV of chunks {TAIL_CHUNKS} among other sequences differs from the whole prompt's, {words}"
            if not np.array_equal(got, expected):
                return f"logits after chunks {TAIL_CHUNKS} among other sequences differ, {words}"
        return None

    def _run_chunks(self, start: int, sizes: Sequence[int], num_threads: int) -> NDArray[np.float32]:
        """Runs the second table's chunks; every other one together with all neighbours. Logits of the last one."""
        logits = np.empty(0, np.float32)
        for number, size in enumerate(sizes):
            end = min(start + size, len(self.tokens))
            if end > start:
                neighbours = self._neighbours() if number % 2 else []
                logits = self.shallow.run([self._step(start, end, self.again), *neighbours], num_threads)
            start = end
        return logits

    def _neighbours(self) -> list[SequenceStep]:
        sizes = [min(size, len(self.tokens)) for size in NEIGHBOUR_TOKENS]
        return [self._step(0, size, table) for size, table in zip(sizes, self.others, strict=True)]

    def _step(self, start: int, end: int, table: range) -> SequenceStep:
        return SequenceStep(self.tokens[start:end], start, table, None)

    def _kv_equal(self, num_tokens: int) -> bool:
        """Whether the blocks of the first positions are the same, byte for byte, in both tables.

        Chunks end with a block, or with the prompt and then both tables' last blocks have zeros behind it.
        """
        memory, num_blocks = self.shallow.memory, blocks_for(num_tokens)
        pairs = zip(self.whole[:num_blocks], self.again[:num_blocks], strict=True)
        return all(memory.block(whole) == memory.block(again) for whole, again in pairs)


def _read(path: Path) -> InvarianceProof | None:
    """None when there is no proof that can be read: it is made again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=InvarianceProof)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write(path: Path, proof: InvarianceProof) -> None:
    """Another engine may be writing the same proof: a rename leaves one of them whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.encode(proof))
    Path(file.name).replace(path)
