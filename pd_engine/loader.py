"""From a model folder and a pool's memory to a running engine.

plan_engine: which kernels, and thus which layout and fingerprint    (reads no weights)
load_engine: weights, self-check, engine
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pd_core.engine import Engine
from pd_core.errors import ConfigError
from pd_core.layout import BlockLayout, DType, Fingerprint
from pd_core.memory import BlockMemory
from pd_engine.decoder import Decoder, rotary_tables
from pd_engine.invariance import NUM_LAYERS, proven
from pd_engine.kernels import DEFAULT_KERNEL, kernel_named, kernels
from pd_engine.native import numerics as native_numerics
from pd_engine.native.build import NativeUnavailable, build
from pd_engine.native.engine import NativeEngine
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel
from pd_engine.native.shallow import ShallowNative
from pd_engine.native.spec import NativeSpec
from pd_engine.numerics import numerics_id
from pd_engine.pool import LAYOUT_NAME, KvPool, torch_dtype
from pd_engine.shallow_decoder import ShallowDecoder
from pd_engine.tensor_file import TensorFile
from pd_engine.torch_engine import TorchEngine, use_threads
from pd_engine.weights import read_weights
from pd_model.folder import ModelFolder
from pd_model.manifest import ModelManifest

AUTO = "auto"
NATIVE = "native"


@dataclass(frozen=True)
class EnginePlan:
    """What will run the model.

    kernel:  "native", or the name of a torch attention kernel
    variant: of the native kernels, for this processor; empty for torch's
    why:     why it is not the native kernels, when nobody asked for others
    """

    folder: ModelFolder
    dtype: DType
    cache_dir: Path
    kernel: str
    variant: str
    layout: BlockLayout
    fingerprint: Fingerprint
    library: Library | None
    why: str | None


def plan_engine(folder: ModelFolder, dtype: DType, cache_dir: Path, kernel: str = AUTO) -> EnginePlan:
    """The native kernels where this machine and this model can have them, else torch's, openly; or those named.

    Builds the native library when it is not there yet.
    Raises ConfigError for an unknown kernel, NativeUnavailable when "native" is asked for and cannot be had.
    """
    if kernel not in (AUTO, NATIVE):
        return _torch_plan(folder, dtype, cache_dir, kernel, None)
    try:
        return _native_plan(folder, dtype, cache_dir)
    except NativeUnavailable as error:
        if kernel == NATIVE:
            raise
        return _torch_plan(folder, dtype, cache_dir, DEFAULT_KERNEL, error.message)


def load_engine(plan: EnginePlan, memory: BlockMemory, *, num_threads: int) -> Engine:
    """Reads the weights, checks (or looks up) the engine's invariance, and takes `memory` as its pool.

    memory:      blocks of `plan.layout`
    num_threads: threads of every step
    Raises ModelError (weights), EngineError (memory does not fit the layout).
    """
    return _load_torch(plan, memory, num_threads) if plan.library is None else _load_native(plan, memory, num_threads)


def torch_layout(manifest: ModelManifest, dtype: DType) -> BlockLayout:
    """How the torch kernels store KV."""
    return BlockLayout(
        name=LAYOUT_NAME,
        num_layers=manifest.num_layers,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        dtype=dtype,
    )


def native_spec(manifest: ModelManifest, dtype: DType) -> NativeSpec:
    """The manifest as the native kernels see it."""
    return NativeSpec(
        num_layers=manifest.num_layers,
        hidden_size=manifest.hidden_size,
        intermediate_size=manifest.intermediate_size,
        num_heads=manifest.num_heads,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        vocab_size=manifest.vocab_size,
        context_tokens=manifest.context_tokens,
        dtype=dtype,
        rms_norm_eps=manifest.rms_norm_eps,
        tied_embeddings=manifest.tied_embeddings,
    )


def _torch_plan(folder: ModelFolder, dtype: DType, cache_dir: Path, kernel: str, why: str | None) -> EnginePlan:
    if kernel not in kernels():
        raise ConfigError(
            f"no kernels {kernel!r}; there are {', '.join((AUTO, NATIVE, *kernels()))}", param="model.kernels"
        )
    layout = torch_layout(folder.manifest, dtype)
    fingerprint = _fingerprint(folder, numerics_id(kernel_named(kernel), dtype), layout)
    return EnginePlan(folder, dtype, cache_dir, kernel, "", layout, fingerprint, None, why)


def _native_plan(folder: ModelFolder, dtype: DType, cache_dir: Path) -> EnginePlan:
    spec = native_spec(folder.manifest, dtype)
    refusal = spec.refusal()
    if refusal is not None:
        raise NativeUnavailable(refusal)
    library = Library(build(cache_dir))
    variants = library.variants(dtype)
    if not variants:
        raise NativeUnavailable(f"this processor runs none of the native kernels for {dtype}")
    numerics = native_numerics.numerics_id(library, variants[0], dtype)
    fingerprint = _fingerprint(folder, numerics, spec.layout)
    return EnginePlan(folder, dtype, cache_dir, NATIVE, variants[0], spec.layout, fingerprint, library, None)


def _load_torch(plan: EnginePlan, memory: BlockMemory, num_threads: int) -> TorchEngine:
    manifest = plan.folder.manifest
    pool = KvPool(memory, plan.layout)
    use_threads(num_threads)
    weights = read_weights(plan.folder.weights_path, manifest, torch_dtype(plan.dtype))
    decoder = Decoder(manifest, weights, kernel_named(plan.kernel))
    proof = proven(
        lambda: ShallowDecoder(decoder, plan.layout),
        plan.fingerprint.numerics,
        plan.folder.weights_digest,
        num_threads,
        plan.cache_dir,
    )
    return TorchEngine(decoder, pool, plan.fingerprint, proof, num_threads, plan.why)


def _load_native(plan: EnginePlan, memory: BlockMemory, num_threads: int) -> NativeEngine:
    manifest = plan.folder.manifest
    tensors = TensorFile(plan.folder.weights_path)
    # the kernels rotate pairs: each angle once; the second half of the sines is the one with its own sign
    cos, sin = (table.numpy() for table in rotary_tables(manifest))
    rotary = (cos[:, : manifest.head_dim // 2], sin[:, manifest.head_dim // 2 :])

    def make(spec: NativeSpec, threads: int) -> NativeModel:
        assert plan.library is not None  # noqa: S101 - narrows
        return NativeModel(plan.library, spec, tensors, rotary, num_threads=threads, variant=plan.variant)

    spec = native_spec(manifest, plan.dtype)
    shallow = native_spec(
        msgspec.structs.replace(manifest, num_layers=min(NUM_LAYERS, manifest.num_layers)), plan.dtype
    )
    proof = proven(
        lambda: ShallowNative(shallow, lambda threads: make(shallow, threads)),
        plan.fingerprint.numerics,
        plan.folder.weights_digest,
        num_threads,
        plan.cache_dir,
    )
    return NativeEngine(make(spec, num_threads), memory, plan.fingerprint, proof)


def _fingerprint(folder: ModelFolder, numerics: str, layout: BlockLayout) -> Fingerprint:
    return Fingerprint(
        weights=folder.weights_digest,
        settings=folder.settings_digest,
        tokenizer=folder.tokenizer_digest,
        numerics=numerics,
        layout=layout,
    )
