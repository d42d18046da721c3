"""The engine's proof, at start and on its real weights, that a row's bits depend on its own sequence alone.

One prompt, past 512 positions, is run whole. Then parts of it are run again: in chunks of other sizes, token by token,
together with other sequences, with one thread and with all. Every byte of KV and every logit must be the same. A few
layers are enough, because all layers multiply the same shapes. The outcome is kept in the cache folder by numerics id,
weights and threads, so that a second start only looks it up.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from pd_core.engine import SequenceStep
from pd_core.layout import BLOCK_TOKENS, BlockLayout, blocks_for
from pd_engine.decoder import Decoder
from pd_engine.philox import uniform
from pd_engine.pool import KvPool
from pd_engine.scratch import ScratchMemory

PROOF_VERSION = 1
PROMPT_TOKENS = 560
NUM_LAYERS = 4
FRONT_CHUNKS = (5, 16, 1, 42)
TAIL_CHUNKS = (1, 1, 3, 16, 1)
NEIGHBOUR_TOKENS = (1, 2, 17, 1, 9)


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
    decoder: Decoder, layout: BlockLayout, numerics: str, weights: str, num_threads: int, cache_dir: Path
) -> InvarianceProof:
    """The proof for this engine: looked up, or made (within a second for a small model) and kept."""
    threads = sorted({1, num_threads})
    key = msgspec.json.encode([PROOF_VERSION, numerics, weights, threads])
    path = cache_dir / "invariance" / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.json"
    known = _read(path)
    if known is not None and (known.numerics, known.weights, known.threads) == (numerics, weights, threads):
        return known
    proof = InvarianceProof(numerics, weights, threads, find_variance(decoder, layout, threads))
    _write(path, proof)
    return proof


def find_variance(decoder: Decoder, layout: BlockLayout, threads: Sequence[int]) -> str | None:
    """None when every way of running the prompt gives the same bits, else a sentence about the first that does not."""
    before = torch.get_num_threads()
    try:
        shallow = decoder.shallow(NUM_LAYERS)
        return _Trial(shallow, msgspec.structs.replace(layout, num_layers=shallow.manifest.num_layers)).run(threads)
    finally:
        torch.set_num_threads(before)


class _Trial:
    """whole and again are two block tables for the prompt; neighbours have blocks of their own."""

    def __init__(self, decoder: Decoder, layout: BlockLayout) -> None:
        manifest = decoder.manifest
        num_tokens = min(PROMPT_TOKENS, manifest.context_tokens)
        self.decoder = decoder
        self.tokens = [int(uniform(0, position) * manifest.vocab_size) for position in range(num_tokens)]
        num_blocks = blocks_for(num_tokens)
        self.whole = range(num_blocks)
        self.again = range(num_blocks, 2 * num_blocks)
        self.others = [range(2 * num_blocks + 2 * i, 2 * num_blocks + 2 * i + 2) for i in range(len(NEIGHBOUR_TOKENS))]
        memory = ScratchMemory(2 * num_blocks + 2 * len(NEIGHBOUR_TOKENS), layout.block_bytes)
        self.pool = KvPool(memory, layout)

    def run(self, threads: Sequence[int]) -> str | None:
        torch.set_num_threads(max(threads))
        expected = self._forward(self._step(0, len(self.tokens), self.whole))
        tail = max(0, len(self.tokens) - sum(TAIL_CHUNKS)) // BLOCK_TOKENS * BLOCK_TOKENS
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            words = f"with {num_threads} thread" + ("s" if num_threads > 1 else "")
            self._run_chunks(0, FRONT_CHUNKS)
            if not self._kv_equal(0, min(sum(FRONT_CHUNKS), len(self.tokens))):
                return f"KV of chunks {FRONT_CHUNKS} differs from the whole prompt's, {words}"
            self.pool.blocks[self.again.start : self.again.stop] = self.pool.blocks[: self.whole.stop]
            got = self._run_chunks(tail, [*TAIL_CHUNKS, len(self.tokens) - tail - sum(TAIL_CHUNKS)])
            if not self._kv_equal(0, len(self.tokens)):
                return f"KV of chunks {TAIL_CHUNKS} among other sequences differs from the whole prompt's, {words}"
            if not torch.equal(got, expected):
                return f"logits after chunks {TAIL_CHUNKS} among other sequences differ, {words}"
        return None

    def _run_chunks(self, start: int, sizes: Sequence[int]) -> Tensor:
        """Runs the second table's chunks; every other one together with all neighbours. Logits of the last one."""
        logits = torch.empty(0)
        for number, size in enumerate(sizes):
            end = min(start + size, len(self.tokens))
            if end > start:
                neighbours = self._neighbours() if number % 2 else []
                logits = self._forward(self._step(start, end, self.again), *neighbours)
            start = end
        return logits

    def _neighbours(self) -> list[SequenceStep]:
        sizes = [min(size, len(self.tokens)) for size in NEIGHBOUR_TOKENS]
        return [self._step(0, size, table) for size, table in zip(sizes, self.others, strict=True)]

    def _step(self, start: int, end: int, table: range) -> SequenceStep:
        return SequenceStep(self.tokens[start:end], start, table, None)

    def _forward(self, *steps: SequenceStep) -> Tensor:
        return self.decoder.forward(steps, [0], self.pool, _never)

    def _kv_equal(self, start: int, end: int) -> bool:
        """Whether KV of positions start .. end - 1 is the same, byte for byte, in both tables."""
        shape = (-1, self.pool.heads_a_block, BLOCK_TOKENS, self.pool.layout.head_dim)
        both = self.pool.blocks.view(torch.uint8).view(self.pool.num_blocks, -1)
        tables = (both[list(self.whole)], both[list(self.again)])
        first, second = (
            table.view(self.pool.blocks.dtype).view(shape).transpose(1, 2).flatten(0, 1)[start:end] for table in tables
        )
        return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _never() -> bool:
    return False


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
