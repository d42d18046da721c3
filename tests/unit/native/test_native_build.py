"""The library is built once, says what is missing, and leaks no instruction that a plain processor lacks."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pd_core.errors import EngineError
from pd_engine.native import build as building
from pd_engine.native.build import NativeUnavailable, build, compile_object, find_compiler, library_path
from pd_engine.native.library import Library


def test_without_a_compiler_the_sentence_says_what_to_install() -> None:
    with pytest.raises(NativeUnavailable, match="need a C\\+\\+ compiler to be built; none of no-such-compiler is"):
        find_compiler(["no-such-compiler"])


def test_on_another_processor_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(NativeUnavailable, match="written for x86-64; this is aarch64"):
        find_compiler()


def test_a_library_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path(tmp_path, find_compiler())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"built before")
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("built again"))
    assert build(tmp_path) == path


def test_a_changed_source_or_compiler_belongs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()
    before = library_path(tmp_path, compiler)
    assert library_path(tmp_path, building.Compiler(compiler.path, compiler.version + "1")) != before
    copied = tmp_path / "src"
    shutil.copytree(building.SOURCES, copied)
    monkeypatch.setattr(building, "SOURCES", copied)
    assert library_path(tmp_path, compiler) == before
    (copied / "math.h").write_text((copied / "math.h").read_text() + " ")
    assert library_path(tmp_path, compiler) != before


def test_a_broken_source_gives_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return nonsense; }")
    with pytest.raises(NativeUnavailable, match="nonsense"):
        compile_object(find_compiler(), source, tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"no library")
    with pytest.raises(EngineError, match="cannot be loaded"):
        Library(path)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of two small files in place of the kernels: built in no time, by the same steps."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "answer.h").write_text("int answer();")
    (sources / "answer.cpp").write_text('#include "answer.h"\nint answer() { return 42; }')
    (sources / "call.cpp").write_text('#include "answer.h"\nextern "C" EXPORT int call() { return answer(); }')
    flags = (*building._FLAGS, '-DEXPORT=__attribute__((visibility("default")))')
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setattr(building, "_FLAGS", flags)
    return sources


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_all_sources_are_built_into_one_library_and_nothing_else_stays(tmp_path: Path, tiny: Path) -> None:
    cache = tmp_path / "cache"
    path = build(cache)
    assert ctypes.CDLL(str(path)).call() == 42
    assert files_below(cache) == [path]
    built_ns = path.stat().st_mtime_ns
    assert build(cache) == path
    assert path.stat().st_mtime_ns == built_ns


def test_builds_at_the_same_time_leave_one_whole_library(tmp_path: Path, tiny: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as threads:
        paths = list(threads.map(build, [cache] * 3))
    assert len(set(paths)) == 1
    assert ctypes.CDLL(str(paths[0])).call() == 42
    assert files_below(cache) == paths[:1]


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, tiny: Path) -> None:
    cache = tmp_path / "cache"
    (tiny / "answer.cpp").write_text("int answer() { return nonsense; }")
    with pytest.raises(NativeUnavailable, match=r"refused answer\.cpp(.|\n)*nonsense"):
        build(cache)
    assert files_below(cache) == []


def test_what_does_not_link_is_no_library(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny / "answer.cpp").write_text('extern "C" __attribute__((visibility("default"))) int call() { return 1; }')
    with pytest.raises(NativeUnavailable, match=r"refused kernels\.so"):
        build(tmp_path / "cache")


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "g++"
    hanging.write_text('#!/bin/sh\n[ "$1" = --version ] && echo hanging 1 || exec sleep 60\n')
    hanging.chmod(0o700)
    monkeypatch.setattr(building, "COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(NativeUnavailable, match="does not work"):
        compile_object(find_compiler([str(hanging)]), tiny / "answer.cpp", tmp_path)


@pytest.mark.parametrize("name", ["variant_avx2", "variant_avx512", "variant_avx512bf16"])
def test_a_variant_shares_no_function_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A function that the linker may merge could run with AVX512 on a processor that has none.

    Without optimisation, so that each function is there to be seen, whether or not it would have been inlined.
    """
    flags = tuple("-O0" if flag == "-O3" else flag for flag in building._FLAGS)
    assert flags != building._FLAGS
    monkeypatch.setattr(building, "_FLAGS", flags)
    compiled = compile_object(find_compiler(), building.SOURCES / f"{name}.cpp", tmp_path)
    listed = subprocess.run(["nm", "-C", str(compiled)], capture_output=True, text=True, check=True).stdout
    defined = [line.split(maxsplit=2) for line in listed.splitlines() if not line.startswith(" ")]
    shared = [symbol for _, kind, symbol in defined if kind.isupper() and not symbol.startswith("kvn::kAvx")]
    weak = [symbol for _, kind, symbol in defined if kind in "VvWwu"]
    assert len(defined) > 100
    assert (shared, weak) == ([], [])
