"""The library is built once, says what is missing, and leaks no instruction that a plain processor lacks."""

from __future__ import annotations

import platform
import shutil
import subprocess
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


@pytest.mark.parametrize("name", ["variant_avx2", "variant_avx512", "variant_avx512bf16"])
def test_a_variant_shares_no_function_with_the_rest(tmp_path: Path, name: str) -> None:
    """A function that the linker may merge could run with AVX512 on a processor that has none."""
    compiled = compile_object(find_compiler(), building.SOURCES / f"{name}.cpp", tmp_path)
    listed = subprocess.run(["nm", "-C", str(compiled)], capture_output=True, text=True, check=True).stdout
    defined = [line.split(maxsplit=2) for line in listed.splitlines() if not line.startswith(" ")]
    shared = [symbol for _, kind, symbol in defined if kind.isupper() and not symbol.startswith("kvn::kAvx")]
    weak = [symbol for _, kind, symbol in defined if kind in "VvWwu"]
    assert defined
    assert (shared, weak) == ([], [])
