"""What two pools must agree on, and what is said when they do not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pd_core.errors import LayoutMismatch
from pd_core.layout import BlockLayout, Fingerprint, check_pairing

LAYOUT = BlockLayout("token-major", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
OURS = Fingerprint("weights-a", "settings-a", "tokenizer-a", "numerics-a", LAYOUT)


def test_a_block_of_the_default_model_is_360_kib_and_twice_that_in_float32() -> None:
    assert LAYOUT.block_bytes == 360 << 10
    assert msgspec.structs.replace(LAYOUT, dtype="float32").block_bytes == 720 << 10


def test_equal_fingerprints_pair() -> None:
    check_pairing(OURS, msgspec.structs.replace(OURS))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "weights-b"},
        {"settings": "settings-b"},
        {"tokenizer": "tokenizer-b"},
        {"numerics": "numerics-b"},
        {"layout": msgspec.structs.replace(LAYOUT, dtype="float32")},
        {"layout": msgspec.structs.replace(LAYOUT, name="head-major")},
        {"layout": msgspec.structs.replace(LAYOUT, num_layers=29)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_differs_is_named_with_both_values(change: dict[str, Any]) -> None:
    theirs = msgspec.structs.replace(OURS, **change)
    with pytest.raises(LayoutMismatch) as caught:
        check_pairing(OURS, theirs)
    (field,) = change
    assert field in caught.value.message
    assert repr(getattr(OURS, field)) in caught.value.message
    assert repr(getattr(theirs, field)) in caught.value.message
