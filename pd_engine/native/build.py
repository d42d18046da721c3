"""Builds the kernels' library with the machine's C++ compiler, once for each state of the sources.

The result lies in a cache folder under a name made from sources, flags and compiler, so that a changed source or
another compiler can never meet an old library, and several processes may build at once.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess  # the compiler, with arguments of our own
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pd_core.errors import EngineError

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "c++", "clang++")
COMPILE_TIMEOUT_S = 300.0

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # a product and a sum become one operation only where the source says so
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",  # gcc's own intrinsics
    "-Wno-uninitialized",
    "-Wno-psabi",
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_VARIANT_FLAGS = {
    "variant_avx2": _AVX2,
    "variant_avx512": _AVX512,
    "variant_avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vbmi"),
}


class NativeUnavailable(EngineError):
    """This machine has no native kernels; the sentence says why. The engine's torch kernels do without."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """path: the program; version: the first line it says about itself"""

    path: str
    version: str


def find_compiler(names: Sequence[str] = COMPILERS) -> Compiler:
    """The first C++ compiler that answers. Raises NativeUnavailable when there is none, or no x86-64 processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise NativeUnavailable(f"native kernels are written for x86-64; this is {platform.machine()}")
    for path in filter(None, map(shutil.which, names)):
        answer = _run([path, "--version"])
        if answer.returncode == 0 and answer.stdout:
            return Compiler(path, answer.stdout.splitlines()[0])
    raise NativeUnavailable(f"native kernels need a C++ compiler to be built; none of {', '.join(names)} is installed")


def library_path(cache_dir: Path, compiler: Compiler) -> Path:
    """Where the library of these sources and this compiler belongs, built or not."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (compiler.version, platform.machine(), repr((_FLAGS, sorted(_VARIANT_FLAGS.items())))):
        digest.update(part.encode() + b"\0")
    for path in sorted(_all_sources()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return cache_dir / "native" / digest.hexdigest() / "kernels.so"


def build(cache_dir: Path) -> Path:
    """Path of the library, built when it is not there yet (some 20 s on two cores).

    Raises NativeUnavailable when there is no compiler, or it fails; the sentence has the compiler's own words.
    """
    compiler = find_compiler()
    path = library_path(cache_dir, compiler)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = _compile(compiler, Path(folder))
        made.replace(path)  # whole or not at all, also when two processes build at once
    return path


def compile_object(compiler: Compiler, source: Path, folder: Path) -> Path:
    """Compiles one source with the flags of its variant. Raises NativeUnavailable."""
    made = folder / f"{source.stem}.o"
    flags = (*_FLAGS, *_VARIANT_FLAGS.get(source.stem, ()))
    _check(_run([compiler.path, *flags, "-I", str(SOURCES), "-c", str(source), "-o", str(made)]), source.name)
    return made


def _compile(compiler: Compiler, folder: Path) -> Path:
    # the variants take longest: first, so that nothing waits for one at the end
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem not in _VARIANT_FLAGS, source.name))
    with ThreadPoolExecutor(max_workers=4) as threads:
        objects = list(threads.map(lambda source: compile_object(compiler, source, folder), sources))
    made = folder / "kernels.so"
    _check(_run([compiler.path, "-shared", "-pthread", *map(str, objects), "-o", str(made)]), made.name)
    return made


def _all_sources() -> Iterator[Path]:
    for pattern in ("*.cpp", "*.h", "*.inc"):
        yield from SOURCES.glob(pattern)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C++ compiler {command[0]} does not work: {error}") from error


def _check(done: subprocess.CompletedProcess[str], what: str) -> None:
    if done.returncode != 0:
        raise NativeUnavailable(f"the C++ compiler refused {what}: {done.stderr[-2000:]}")
