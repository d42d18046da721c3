"""The library's C interface as typed Python: `src/api.h`, line by line. ctypes releases the GIL in every call."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from pd_core.errors import Cancelled, EngineError
from pd_core.layout import DType
from pd_engine.native.spec import WeightForm

ABI_VERSION = 2
ERROR_BYTES = 512
DTYPE_NUMBERS: dict[DType, int] = {"float32": 0, "bfloat16": 1}

WEIGHTS_NUMBERS: dict[WeightForm, int] = {"dtype": 0, "int8": 1}

_OK, _CANCELLED = 0, 1

ShouldStop = ctypes.CFUNCTYPE(c_int32)


class Spec(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("context_tokens", c_int32),
        ("dtype", c_int32),
        ("weights", c_int32),
        ("rms_norm_eps", c_float),
        ("attention_scale", c_float),
    ]


class Step(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("num_rows", c_int32),
        ("num_sequences", c_int32),
        ("num_selected", c_int32),
        ("num_blocks", c_int32),
        ("ids", c_void_p),
        ("row_bounds", c_void_p),
        ("starts", c_void_p),
        ("tables", c_void_p),
        ("table_bounds", c_void_p),
        ("selected", c_void_p),
        ("logits", c_void_p),
        ("pool", c_void_p),
        ("pool_bytes", c_int64),
        ("should_stop", c_void_p),
        ("stop_interval_us", c_int32),
    ]


_ERROR = [POINTER(c_char), c_size_t]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "kvn_abi_version": (c_int32, []),
    "kvn_variant": (c_char_p, [c_int32, c_int32]),
    "kvn_variant_runs_here": (c_int32, [c_char_p]),
    "kvn_create": (c_int32, [POINTER(Spec), c_char_p, c_int32, POINTER(c_void_p), *_ERROR]),
    "kvn_destroy": (None, [c_void_p]),
    "kvn_set_matrix": (c_int32, [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_int64, *_ERROR]),
    "kvn_set_bias": (c_int32, [c_void_p, c_int32, c_int32, c_int64, c_void_p, c_int64, *_ERROR]),
    "kvn_set_vector": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int64, *_ERROR]),
    "kvn_set_tables": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, *_ERROR]),
    "kvn_forward": (c_int32, [c_void_p, POINTER(Step), *_ERROR]),
    "kvn_advise_huge_pages": (c_int32, [c_void_p, c_int64]),
}


class Library:
    """A loaded library. Raises EngineError when it cannot be loaded or is of another version."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise EngineError(f"the native library {path} cannot be loaded: {error}") from error
        version = self._library.kvn_abi_version()
        if version != ABI_VERSION:
            raise EngineError(f"the native library {path} has interface {version}; {ABI_VERSION} is needed")

    def variants(self, dtype: DType) -> list[str]:
        """Names of the variants that have kernels for the dtype and run on this processor, best first."""
        names: list[str] = []
        index = 0
        while (name := self._library.kvn_variant(DTYPE_NUMBERS[dtype], index)) is not None:
            if self._library.kvn_variant_runs_here(name):
                names.append(name.decode())
            index += 1
        return names

    def create(self, spec: Spec, variant: str, num_threads: int) -> int:
        """A model's handle, to be destroyed. Raises EngineError."""
        handle = c_void_p()
        self._call("kvn_create", ctypes.byref(spec), variant.encode(), num_threads, ctypes.byref(handle))
        if handle.value is None:
            raise EngineError("the native library made no model")
        return handle.value

    def destroy(self, handle: int) -> None:
        self._library.kvn_destroy(handle)

    def set_matrix(
        self,
        handle: int,
        matrix: int,
        layer: int,
        first_row: int,
        address: int,
        scales: int | None,
        shape: tuple[int, int],
    ) -> None:
        """scales: address of one a row for 8-bit weights, else None"""
        self._call("kvn_set_matrix", handle, matrix, layer, first_row, address, scales, *shape)

    def set_bias(self, handle: int, matrix: int, layer: int, first_row: int, address: int, rows: int) -> None:
        self._call("kvn_set_bias", handle, matrix, layer, first_row, address, rows)

    def set_vector(self, handle: int, vector: int, layer: int, address: int, size: int) -> None:
        self._call("kvn_set_vector", handle, vector, layer, address, size)

    def set_tables(self, handle: int, embedding: int, cos: int, sin: int) -> None:
        self._call("kvn_set_tables", handle, embedding, cos, sin)

    def forward(self, handle: int, step: Step) -> None:
        """Raises EngineError (with the library's sentence), Cancelled."""
        self._call("kvn_forward", handle, ctypes.byref(step))

    def advise_huge_pages(self, address: int, num_bytes: int) -> bool:
        """Whether the system agreed to put huge pages behind this memory."""
        return bool(self._library.kvn_advise_huge_pages(address, num_bytes) == 0)

    def _call(self, name: str, *arguments: Any) -> None:
        error = ctypes.create_string_buffer(ERROR_BYTES)
        status = getattr(self._library, name)(*arguments, error, ERROR_BYTES)
        if status == _CANCELLED:
            raise Cancelled("stopped between two layers of a step")
        if status != _OK:
            raise EngineError(f"native kernels: {error.value.decode(errors='replace')}")
