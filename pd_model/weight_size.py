"""How much memory a worker's weights take, by the manifest alone."""

from __future__ import annotations

from math import prod
from typing import Literal

from pd_core.layout import DTYPE_BYTES, DType
from pd_model.manifest import ModelManifest, tensor_shapes

SCALE_BYTES = 4


def weights_bytes(manifest: ModelManifest, dtype: DType, form: Literal["dtype", "int8"]) -> int:
    """Bytes of weights and rotary tables in one worker, whichever kernels run: rather too many than too few.

    A tied head counts as if it were untied, because the native kernels pack it for themselves.
    form: "int8" keeps every matrix but the embedding in 8 bits and a scale a row
    """
    shapes = tensor_shapes(manifest) | {"lm_head.weight": (manifest.vocab_size, manifest.hidden_size)}
    total_bytes = 0
    for name, shape in shapes.items():
        if form == "int8" and len(shape) == 2 and name != "model.embed_tokens.weight":
            total_bytes += prod(shape) + shape[0] * SCALE_BYTES
        else:
            total_bytes += prod(shape) * DTYPE_BYTES[dtype]
    rotary_numbers = 2 * manifest.context_tokens * manifest.head_dim
    return total_bytes + rotary_numbers * DTYPE_BYTES["float32"]
