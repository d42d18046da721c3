"""From a model folder and a pool's memory to a running engine.

plan_engine:    which kernels, and thus which layout and fingerprint    (reads no weights)
load_engine:    weights, self-check, engine over a pool in memory
load_on_device: the same over a pool on the plan's device
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from pd_core.engine import Engine
from pd_core.errors import ConfigError, EngineError
from pd_core.layout import BlockLayout, DType, Fingerprint
from pd_core.memory import BlockMemory
from pd_engine.decoder import Decoder
from pd_engine.device import CPU, Device, find_device
from pd_engine.invariance import NUM_LAYERS, InvarianceProof, proven
from pd_engine.kernels import DEFAULT_KERNEL, kernel_named, kernels
from pd_engine.native import numerics as native_numerics
from pd_engine.native.build import NativeUnavailable, build
from pd_engine.native.engine import NativeEngine
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel
from pd_engine.native.shallow import ShallowNative
from pd_engine.native.spec import NativeSpec, WeightForm
from pd_engine.numerics import numerics_id
from pd_engine.pool import LAYOUT_NAME, DeviceKvPool, KvPool, torch_dtype
from pd_engine.rotary import rotary_tables
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
    device:  where weights and KV lie
    weights: how the native kernels keep them
    why:     why it is not the native kernels, when nobody asked for others
    """

    folder: ModelFolder
    dtype: DType
    cache_dir: Path
    kernel: str
    variant: str
    device: torch.device
    weights: WeightForm
    layout: BlockLayout
    fingerprint: Fingerprint
    library: Library | None
    why: str | None


def plan_engine(
    folder: ModelFolder,
    dtype: DType,
    cache_dir: Path,
    kernel: str = AUTO,
    device: Device = "cpu",
    weights: WeightForm = "dtype",
) -> EnginePlan:
    """The native kernels where this machine and this model can have them, else torch's, openly; or those named.

    On "cuda" it is always torch's; "int8" weights are the native kernels' alone.
    Builds the native library when it is not there yet.
    Raises ConfigError for an unknown kernel, or a device or weights that cannot be had with it; NativeUnavailable when
    the native kernels are asked for, by name or by int8, and cannot be had.
    """
    native_only = kernel == NATIVE or weights == "int8"
    if device == "cuda" and native_only:
        raise ConfigError("native kernels and int8 weights run on the cpu alone", param="model.device")
    if weights == "int8" and kernel not in (AUTO, NATIVE):
        raise ConfigError(f"int8 weights are of the native kernels alone, not of {kernel!r}", param="model.weights")
    if device == "cuda" and kernel == AUTO:
        kernel = DEFAULT_KERNEL
    if kernel not in (AUTO, NATIVE):
        return _torch_plan(folder, dtype, cache_dir, kernel, device, None)
    try:
        return _native_plan(folder, dtype, cache_dir, weights)
    except NativeUnavailable as error:
        if native_only:
            raise
        return _torch_plan(folder, dtype, cache_dir, DEFAULT_KERNEL, device, error.message)


def load_engine(plan: EnginePlan, memory: BlockMemory, *, num_threads: int) -> Engine:
    """Reads the weights, checks (or looks up) the engine's invariance, and takes `memory` as its pool.

    memory:      blocks of `plan.layout`
    num_threads: threads of every step
    Raises ModelError (weights), EngineError (memory does not fit the layout, or the plan is for another device).
    """
    if plan.library is not None:
        return _load_native(plan, memory, num_threads)
    if plan.device.type != "cpu":
        raise EngineError(f"an engine on {plan.device} has no pool in memory")
    return _load_torch(plan, KvPool(memory, plan.layout), num_threads)


def load_on_device(plan: EnginePlan, num_blocks: int, *, num_threads: int) -> tuple[Engine, DeviceKvPool]:
    """The same with a new pool of `num_blocks` blocks on the plan's device, whose engine is torch's.

    Raises ModelError (weights), EngineError (the device has no room, or the native kernels were planned).
    """
    if plan.library is not None:
        raise EngineError(f"the native kernels have their pool in memory, not on {plan.device}")
    pool = DeviceKvPool(num_blocks, plan.layout, plan.device)
    return _load_torch(plan, pool, num_threads), pool


def torch_layout(manifest: ModelManifest, dtype: DType) -> BlockLayout:
    """How the torch kernels store KV."""
    return BlockLayout(
        name=LAYOUT_NAME,
        num_layers=manifest.num_layers,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        dtype=dtype,
    )


def native_spec(manifest: ModelManifest, dtype: DType, weights: WeightForm = "dtype") -> NativeSpec:
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
        weights=weights,
    )


def _torch_plan(
    folder: ModelFolder, dtype: DType, cache_dir: Path, kernel: str, device_name: Device, why: str | None
) -> EnginePlan:
    if kernel not in kernels():
        raise ConfigError(
            f"no kernels {kernel!r}; there are {', '.join((AUTO, NATIVE, *kernels()))}", param="model.kernels"
        )
    device = find_device(device_name)
    layout = torch_layout(folder.manifest, dtype)
    fingerprint = _fingerprint(folder, numerics_id(kernel_named(kernel), dtype, device), layout)
    return EnginePlan(folder, dtype, cache_dir, kernel, "", device, "dtype", layout, fingerprint, None, why)


def _native_plan(folder: ModelFolder, dtype: DType, cache_dir: Path, weights: WeightForm) -> EnginePlan:
    spec = native_spec(folder.manifest, dtype, weights)
    refusal = spec.refusal()
    if refusal is not None:
        raise NativeUnavailable(refusal)
    library = Library(build(cache_dir))
    variants = library.variants(dtype)
    if not variants:
        raise NativeUnavailable(f"this processor runs none of the native kernels for {dtype}")
    numerics = native_numerics.numerics_id(library, variants[0], dtype, weights)
    fingerprint = _fingerprint(folder, numerics, spec.layout)
    return EnginePlan(
        folder, dtype, cache_dir, NATIVE, variants[0], CPU, weights, spec.layout, fingerprint, library, None
    )


def _load_torch(plan: EnginePlan, pool: KvPool, num_threads: int) -> TorchEngine:
    manifest = plan.folder.manifest

    def make_pool(memory: BlockMemory, layout: BlockLayout) -> KvPool:
        if isinstance(pool, DeviceKvPool):
            return DeviceKvPool(memory.num_blocks, layout, plan.device)
        return KvPool(memory, layout)

    use_threads(num_threads)
    weights = read_weights(plan.folder.weights_path, manifest, torch_dtype(plan.dtype), plan.device)
    decoder = Decoder(manifest, weights, kernel_named(plan.kernel))
    proof = proven(
        lambda: ShallowDecoder(decoder, plan.layout, make_pool),
        plan.fingerprint.numerics,
        plan.folder.weights_digest,
        num_threads if plan.device.type == "cpu" else 1,
        plan.cache_dir,
    )
    return TorchEngine(decoder, pool, plan.fingerprint, promised(proof, plan.device), num_threads, plan.why)


def promised(proof: InvarianceProof, device: torch.device) -> InvarianceProof:
    """A trial proves what kernels are made for. Those of a CUDA device choose their order by the number of rows: that
    one trial saw no difference says nothing of the next batch."""
    if device.type == "cpu" or proof.failure is not None:
        return proof
    return msgspec.structs.replace(proof, failure=f"no difference was found on {device}, but its kernels promise none")


def _load_native(plan: EnginePlan, memory: BlockMemory, num_threads: int) -> NativeEngine:
    manifest = plan.folder.manifest
    tensors = TensorFile(plan.folder.weights_path)
    rotary = rotary_tables(manifest)

    def make(spec: NativeSpec, threads: int) -> NativeModel:
        assert plan.library is not None  # noqa: S101 - narrows
        return NativeModel(plan.library, spec, tensors, rotary, num_threads=threads, variant=plan.variant)

    spec = native_spec(manifest, plan.dtype, plan.weights)
    shallow = dataclasses.replace(spec, num_layers=min(NUM_LAYERS, manifest.num_layers))
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
