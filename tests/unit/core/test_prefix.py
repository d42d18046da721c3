"""Names of blocks: equal for equal prefixes of one tenant and one model, and for nothing else."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.layout import BLOCK_TOKENS, BlockLayout, Fingerprint
from pd_core.prefix import PrefixChain, prefix_hashes, prefix_root

SALT = bytes(range(32))
PRINT = Fingerprint("wéights", "settings", "tokenizer", "numerics", BlockLayout("rows", 30, 3, 64, "bfloat16"))
ROOT = prefix_root(PRINT, SALT)
IDS = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
SEQUENCES = st.lists(IDS, max_size=5 * BLOCK_TOKENS)
FULL_SEQUENCES = st.lists(IDS, min_size=BLOCK_TOKENS, max_size=5 * BLOCK_TOKENS)


def as_documented(salt: bytes, fingerprint: Fingerprint, tokens: list[int]) -> list[bytes]:
    """Written from the module's docstring alone."""

    def u32(number: int) -> bytes:
        return number.to_bytes(4, "little")

    def text(value: str) -> bytes:
        return u32(len(value.encode("utf-8"))) + value.encode("utf-8")

    layout = fingerprint.layout
    data = text(fingerprint.weights) + text(fingerprint.settings) + text(fingerprint.tokenizer)
    data += text(fingerprint.numerics) + text(layout.name)
    data += u32(layout.num_layers) + u32(layout.num_kv_heads) + u32(layout.head_dim) + text(layout.dtype) + u32(16)
    root = hashlib.blake2b(data, digest_size=16, key=salt, person=b"kvrelay-root-v01").digest()
    names = [root]
    for block in range(len(tokens) // 16):
        ids = b"".join(map(u32, tokens[16 * block : 16 * block + 16]))
        link = hashlib.blake2b(names[-1] + ids, digest_size=16, key=root, person=b"kvrelay-block-v1")
        names.append(link.digest())
    return names


def test_names_are_those_that_were_given_out_before() -> None:
    """They stand in files on disks: with another value here, everything that was kept is lost."""
    assert ROOT.hex() == "9ee009594c075d858e3bb84f58e2c5ab"
    assert [name.hex() for name in prefix_hashes(ROOT, list(range(40)))] == [
        "1aaf45d67769d9259799f9cb6e098b91",
        "c2e1fa0fd5e33c9bd7b849e1a0c3258c",
    ]
    assert prefix_hashes(ROOT, [2**32 - 1] * 16)[0].hex() == "c8f39ee3dd81b569cfc69f2d436be276"


@given(st.binary(min_size=16, max_size=64), SEQUENCES)
def test_the_docstring_is_enough_to_make_the_same_names(salt: bytes, tokens: list[int]) -> None:
    root = prefix_root(PRINT, salt)
    assert [root, *prefix_hashes(root, tokens)] == as_documented(salt, PRINT, tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 32, 33])
def test_only_full_blocks_have_a_name(num_tokens: int) -> None:
    assert len(prefix_hashes(ROOT, [7] * num_tokens)) == num_tokens // 16


@given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_names_are_equal_exactly_as_far_as_the_tokens_are(
    common: list[int], first: list[int], second: list[int]
) -> None:
    ours, theirs = common + first, common + second
    for block, (mine, other) in enumerate(zip(prefix_hashes(ROOT, ours), prefix_hashes(ROOT, theirs), strict=False)):
        end = (block + 1) * BLOCK_TOKENS
        assert (mine == other) == (ours[:end] == theirs[:end])


@given(FULL_SEQUENCES, st.data())
def test_one_token_changed_changes_its_block_and_all_later_ones(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS - 1))
    changed = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
    before, after = prefix_hashes(ROOT, tokens), prefix_hashes(ROOT, changed)
    block = place // BLOCK_TOKENS
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after)


def test_the_same_tokens_later_in_a_sequence_have_another_name() -> None:
    names = prefix_hashes(ROOT, [5] * 16 * 8)
    assert len({ROOT, *names}) == 9


def _with_other(fingerprint: Fingerprint) -> list[Fingerprint]:
    """One for each field, of the layout too, in which that field alone is another."""
    others = []
    for field in Fingerprint.__struct_fields__:
        value = getattr(fingerprint, field)
        if isinstance(value, str):
            others.append(msgspec.structs.replace(fingerprint, **{field: value + "x"}))
    for field in BlockLayout.__struct_fields__:
        value = getattr(fingerprint.layout, field)
        layout = msgspec.structs.replace(
            fingerprint.layout, **{field: value + 1 if isinstance(value, int) else value + "x"}
        )
        others.append(msgspec.structs.replace(fingerprint, layout=layout))
    return others


def test_every_field_of_the_fingerprint_makes_other_names() -> None:
    others = _with_other(PRINT)
    assert len(others) == len(Fingerprint.__struct_fields__) - 1 + len(BlockLayout.__struct_fields__)
    assert len({prefix_root(other, SALT) for other in [PRINT, *others]}) == len(others) + 1


def test_text_cannot_move_from_one_field_of_the_fingerprint_to_the_next() -> None:
    moved = msgspec.structs.replace(PRINT, weights=PRINT.weights[:-1], settings=PRINT.weights[-1] + PRINT.settings)
    assert prefix_root(moved, SALT) != ROOT


@given(st.binary(min_size=16, max_size=64), FULL_SEQUENCES)
def test_another_salt_shares_no_name(salt: bytes, tokens: list[int]) -> None:
    other = prefix_root(PRINT, salt)
    shared = set(prefix_hashes(ROOT, tokens)) & set(prefix_hashes(other, tokens))
    assert bool(shared) == (salt == SALT)


def test_a_leaked_name_is_not_enough_to_go_on_from() -> None:
    tokens = list(range(48))
    names = prefix_hashes(ROOT, tokens)
    other = prefix_root(PRINT, SALT[::-1])
    assert prefix_hashes(other, tokens, 1, names[0]) != names[1:]


@given(SEQUENCES, st.integers(0, 6))
def test_hashing_goes_on_from_any_block(tokens: list[int], first_block: int) -> None:
    names = prefix_hashes(ROOT, tokens)
    parent = names[first_block - 1] if 0 < first_block <= len(names) else b"p" * 16
    assert prefix_hashes(ROOT, tokens, first_block, parent if first_block else None) == names[first_block:]


@given(st.lists(st.lists(IDS, max_size=40), max_size=8))
def test_a_chain_that_grows_has_the_names_of_the_whole(pieces: list[list[int]]) -> None:
    chain, tokens, made = PrefixChain(ROOT), [], []
    for piece in pieces:
        tokens += piece
        made += chain.extend(piece)
        assert chain.names == made == prefix_hashes(ROOT, tokens)
        assert chain.num_tokens == len(tokens)
    assert [chain.parent_of(block) for block in range(len(made) + 1)] == [ROOT, *made]


@pytest.mark.parametrize("token", [-1, 2**32])
@pytest.mark.parametrize("place", [0, 15, 16])
def test_a_chain_refuses_what_is_no_id_and_stays_as_it_was(token: int, place: int) -> None:
    chain = PrefixChain(ROOT)
    chain.extend(list(range(20)))
    tokens = [1] * 20
    tokens[place] = token
    with pytest.raises(ValueError, match="token id"):
        chain.extend(tokens)
    assert chain.num_tokens == 20
    assert chain.extend(list(range(20, 32))) == prefix_hashes(ROOT, list(range(32)))[1:]


@pytest.mark.parametrize(
    ("first_block", "parent"), [(0, b"p" * 16), (1, None), (-1, None), (-1, b"p" * 16), (1, b"short"), (1, b"")]
)
def test_a_parent_that_cannot_be_is_refused(first_block: int, parent: bytes | None) -> None:
    with pytest.raises(ValueError, match="parent"):
        prefix_hashes(ROOT, list(range(64)), first_block, parent)


def test_ids_salts_and_roots_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="token id"):
        prefix_hashes(ROOT, [-1] * 16)
    for salt in (b"", b"s" * 15, b"s" * 65):
        with pytest.raises(ValueError, match="salt"):
            prefix_root(PRINT, salt)
    with pytest.raises(ValueError, match="root"):
        prefix_hashes(b"", list(range(16)))
    with pytest.raises(ValueError, match="root"):
        PrefixChain(b"r" * 17)
    with pytest.raises(ValueError, match="outside"):
        PrefixChain(ROOT).parent_of(1)
