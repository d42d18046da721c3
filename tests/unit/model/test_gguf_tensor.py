"""Each quantised type against the formula that defines it, written out number by number."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pd_model.gguf_tensor import STORED_AS, read_stored
from pd_model.stored_type import to_bfloat16

Kind = gguf.GGMLQuantizationType
ROWS, COLS = 5, 512


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def nibbles(quants: bytes) -> list[int]:
    return [byte & 15 for byte in quants] + [byte >> 4 for byte in quants]


def fifths(high: bytes) -> list[int]:
    bits = int.from_bytes(high, "little")
    return [(bits >> i & 1) << 4 for i in range(32)]


def q4_0(block: bytes) -> Iterator[float]:
    yield from (half(block, 0) * (q - 8) for q in nibbles(block[2:]))


def q4_1(block: bytes) -> Iterator[float]:
    yield from (half(block, 0) * q + half(block, 2) for q in nibbles(block[4:]))


def q5_0(block: bytes) -> Iterator[float]:
    yield from (half(block, 0) * ((q | h) - 16) for q, h in zip(nibbles(block[6:]), fifths(block[2:6]), strict=True))


def q5_1(block: bytes) -> Iterator[float]:
    pairs = zip(nibbles(block[8:]), fifths(block[4:8]), strict=True)
    yield from (half(block, 0) * (q | h) + half(block, 2) for q, h in pairs)


def q8_0(block: bytes) -> Iterator[float]:
    yield from (half(block, 0) * q for q in struct.unpack("<32b", block[2:]))


def scale_and_min(packed: bytes, group: int) -> tuple[int, int]:
    """Six bits each, of group 0 .. 7; those of 4 .. 7 lie in two parts."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
    return scale, (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)


def q4_k(block: bytes) -> Iterator[float]:
    for group in range(8):
        scale, least = scale_and_min(block[4:16], group)
        quants = block[16 + group // 2 * 32 :][:32]
        for byte in quants:
            yield half(block, 0) * scale * (byte >> 4 if group % 2 else byte & 15) - half(block, 2) * least


def q5_k(block: bytes) -> Iterator[float]:
    for group in range(8):
        scale, least = scale_and_min(block[4:16], group)
        quants = block[48 + group // 2 * 32 :][:32]
        for byte, high in zip(quants, block[16:48], strict=True):
            q = (byte >> 4 if group % 2 else byte & 15) + 16 * (high >> group & 1)
            yield half(block, 0) * scale * q - half(block, 2) * least


def q6_k(block: bytes) -> Iterator[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    for i in range(256):
        part, quarter, column = i // 128, i % 128 // 32, i % 32
        byte = low[64 * part + 32 * (quarter % 2) + column]
        q = byte >> 4 if quarter >= 2 else byte & 15
        q |= (high[32 * part + column] >> 2 * quarter & 3) << 4
        yield half(block, 208) * scales[i // 16] * (q - 32)


FORMULAS: dict[Kind, tuple[Callable[[bytes], Iterator[float]], tuple[int, ...]]] = {
    # where in a block float16 numbers stand
    Kind.Q4_0: (q4_0, (0,)),
    Kind.Q4_1: (q4_1, (0, 2)),
    Kind.Q5_0: (q5_0, (0,)),
    Kind.Q5_1: (q5_1, (0, 2)),
    Kind.Q8_0: (q8_0, (0,)),
    Kind.Q4_K: (q4_k, (0, 2)),
    Kind.Q5_K: (q5_k, (0, 2)),
    Kind.Q6_K: (q6_k, (208,)),
}


def random_blocks(kind: Kind) -> npt.NDArray[np.uint8]:
    """Any bytes at all but for the float16 scales: [ROWS, bytes]"""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (ROWS * COLS // numbers, size), np.uint8)
    for at in FORMULAS[kind][1]:
        scales = draw.uniform(-0.02, 0.02, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(ROWS, -1)


def tensor_in_a_file(path: Path, data: npt.NDArray[np.generic], kind: Kind) -> gguf.ReaderTensor:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path).tensors[0]


@pytest.mark.parametrize("kind", list(FORMULAS), ids=lambda kind: kind.name)
def test_a_quantised_tensor_is_what_the_formula_says_rounded_once(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_model.gguf_tensor.SLICE_NUMBERS", 2 * COLS)  # some slices, the last one short
    data = random_blocks(kind)
    formula, size = FORMULAS[kind][0], gguf.GGML_QUANT_SIZES[kind][1]
    raw = data.tobytes()
    slow = [value for at in range(0, len(raw), size) for value in formula(raw[at : at + size])]
    expected = np.array(slow).reshape(ROWS, COLS)
    dequantised = gguf.dequantize(data, kind)
    np.testing.assert_allclose(dequantised, expected, rtol=1e-5, atol=1e-6)
    stored = read_stored(tensor_in_a_file(tmp_path / "t.gguf", data, kind))
    np.testing.assert_array_equal(stored, to_bfloat16(dequantised))


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "<f4"), (Kind.F16, "<f2"), (Kind.BF16, "<u2")])
def test_an_unquantised_tensor_is_kept_to_the_bit(tmp_path: Path, kind: Kind, dtype: str) -> None:
    bits = np.random.default_rng(3).integers(0, 256, (ROWS, COLS * np.dtype(dtype).itemsize), np.uint8)
    numbers = bits.view(dtype)
    tensor = tensor_in_a_file(tmp_path / "t.gguf", bits if kind is Kind.BF16 else numbers, kind)
    assert read_stored(tensor).dtype == np.dtype(dtype)
    assert read_stored(tensor).tobytes() == numbers.tobytes()


def test_every_type_that_is_read_is_tested() -> None:
    assert set(STORED_AS) == {*FORMULAS, Kind.F32, Kind.F16, Kind.BF16}


def test_rounding_to_bfloat16_is_torchs() -> None:
    draw = np.random.default_rng(5)
    any_bits = draw.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    ties = (draw.integers(0, 2**16, 50_000, np.uint32) << 16 | 0x8000).view(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, 2.0**-133], np.float32)
    values = np.concatenate([any_bits, ties, edges])
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    ours = torch.from_numpy(to_bfloat16(values)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.view(torch.int16)[~ours.isnan()], theirs.view(torch.int16)[~ours.isnan()])
