"""How the C++ library is compiled and loaded, and what happens if that is impossible."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_ops
import torch
from helpers import ROOT

from xformer.ops import native

PLAIN = {k: v for k, v in os.environ.items() if k not in ("XFORMER_NATIVE", "XFORMER_MARCH", "CXX")}
AGAIN = "install xformer again on this machine"
# reports about the library after using it
USED = """
import torch
from xformer.ops import native
x = torch.ones(2, 3)
if not native.absent:
    native.call("dropout", x.dtype, x, y := torch.empty(2, 3), 2, 3, 0.0, None)
    assert torch.equal(x, y)
print(native.absent, native.note(torch.device("cpu")), sep="|")
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package that was never compiled."""
    without = shutil.ignore_patterns("*.so", "micro", "__pycache__")
    shutil.copytree(ROOT / "xformer", tmp_path / "copy/xformer", ignore=without)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "copy")
    return tmp_path / "copy"


def compiled(package: Path, compiler: str = "c++") -> str:
    """Compile the copy as an installation does, which always succeeds; return what it prints."""
    ended = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=package,
        capture_output=True,
        text=True,
        env={**PLAIN, "CXX": compiler},
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def asked(package: Path, code: str = USED) -> str:
    """What a new process prints about the copy's library, by default after using it."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package,
        capture_output=True,
        text=True,
        env={**PLAIN, "PYTHONPATH": str(package)},
        timeout=240,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout.strip()


def wrapped(folder: Path, text: str) -> str:
    """Write an executable that takes the place of the compiler."""
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def said(why: str) -> str:
    return f"{why}|no C++ operations ({why}): steps take 1.3 to 1.6 times as long"


Loading = Callable[[Path], tuple[native.Functions, str]]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loading:
    """Load the library of a copy into this process: its functions, or why it is not used."""
    monkeypatch.delenv("XFORMER_NATIVE", raising=False)

    def load(package: Path) -> tuple[native.Functions, str]:
        monkeypatch.setattr(native, "SOURCE", package / "xformer/ops/native.cpp")
        monkeypatch.setattr(native, "LIBRARY", package / "xformer/ops" / native.LIBRARY.name)
        functions, _, why = native._loaded()
        return functions, why

    return load


@pytest.fixture
def small(package: Path) -> Path:
    """A copy whose source has what native.py looks for, but no operations; it compiles quickly."""
    facts = ("source", "processor", "build")
    lines = [f"const char* xformer_{name} = XFORMER_{name.upper()};" for name in facts]
    for name in native.FUNCTIONS:
        lines += [f"void* {name}_{kind} = nullptr;" for kind in native.TYPES.values()]
    source = "\n".join(['extern "C" {', *lines, "}\n"])
    (package / "xformer/ops/native.cpp").write_text(source, encoding="utf-8")
    return package


@linux
def test_the_suite_has_the_library() -> None:
    """Without the library, the suite would test only the plain versions of the operations."""
    assert native.absent in ("", native.OFF)


@linux
@pytest.mark.slow
def test_a_library_is_compiled_and_loaded_and_computes_the_same(
    package: Path, loaded: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes what the plain operations do, also on a processor without AVX-512.

    The library uses PyTorch's OpenMP. With two OpenMP libraries, each would start its own threads.
    """
    narrow = wrapped(package, 'exec c++ "$@" -mno-avx512f')
    compiled(package, narrow if platform.machine() == "x86_64" else "c++")
    made = [x.name for x in (package / "xformer/ops").iterdir() if "native" in x.name]
    assert sorted(made) == sorted([native.LIBRARY.name, "native.cpp", "native.py"])
    openmp = (
        "import re\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len(set(re.findall(r'\\S*/lib[gi]?omp[^/]*$', maps, re.M))))"
    )
    assert asked(package, f"{USED}\n{openmp}") == "|\n1"
    functions, absent = loaded(package)
    assert not absent
    monkeypatch.setattr(native, "_functions", functions)
    monkeypatch.setattr(native, "absent", "")
    for case in test_ops.CASES:
        for rate in (0.0, test_ops.RATE):
            test_ops.test_a_way_equals_the_plain_one_in_fp64(case, "C++", torch.float32, rate)


@linux
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_one_build_serves_several_processors(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`XFORMER_MARCH=x86-64-v2` sets the compiler's option and the features that are compared."""
    monkeypatch.setitem(PLAIN, "XFORMER_MARCH", "x86-64-v2")
    compiled(small, wrapped(small, f'echo "$@" >> {tmp_path}/line; exec c++ "$@"'))
    assert "-march=x86-64-v2" in (tmp_path / "line").read_text().split()
    library = (small / "xformer/ops" / native.LIBRARY.name).read_bytes()
    assert b"popcnt sse4_1 sse4_2 ssse3\0" in library
    monkeypatch.setitem(PLAIN, "XFORMER_MARCH", "fast")
    with pytest.raises(AssertionError, match="XFORMER_MARCH=fast: give one of native, x86-64-v2"):
        compiled(small)


@linux
def test_without_a_compiler_the_installation_goes_on(package: Path) -> None:
    for text in (
        "",
        '[ "$1" = --version ] && exit 0; echo "error: no" >&2; exit 1',
        "printf '\\377'",
        "exit 0",
    ):
        compiler = wrapped(package, text) if text else "/nowhere/c++"
        assert "_native" in compiled(package, compiler), text
        assert not (package / "xformer/ops" / native.LIBRARY.name).exists(), text
    assert asked(package) == said(f"they were not compiled; {AGAIN}, with a C++ compiler")


@linux
def test_a_library_of_another_source_is_not_used(small: Path, loaded: Loading) -> None:
    compiled(small)
    functions, absent = loaded(small)
    assert (len(functions), absent) == (2 * len(native.FUNCTIONS), "")
    with (small / "xformer/ops/native.cpp").open("a", encoding="utf-8") as file:
        file.write("// changed\n")
    assert loaded(small) == ({}, f"native.cpp has changed since it was compiled; {AGAIN}")


@linux
def test_a_library_for_another_processor_is_not_used(small: Path, loaded: Loading) -> None:
    features = "hypervisor avx0 avx1 fma9 sse9"
    other = f"""exec c++ "$@" -UXFORMER_PROCESSOR '-DXFORMER_PROCESSOR="{features}"'"""
    compiled(small, wrapped(small, other))
    why = f"they were compiled for a processor with avx0 avx1 fma9 ...; {AGAIN}"
    assert loaded(small) == ({}, why)


@linux
def test_a_library_that_is_damaged_is_not_used(package: Path) -> None:
    """Loading one that is cut off would end Python with SIGBUS."""
    code = (
        "from xformer.ops import native\n"
        "whole = open(sys.argv[1], 'rb').read()\n"
        "for share in (0.05, 0.5, 0.9, 0.999):\n"
        "    native.LIBRARY.write_bytes(whole[:int(share * len(whole))])\n"
        "    print(native._loaded())\n"
        "for content in (b'nothing of the kind', b'', whole[:60]):\n"
        "    native.LIBRARY.write_bytes(content)\n"
        "    print(native._loaded())"
    )
    code = f"import sys; sys.argv = ['', {str(native.LIBRARY)!r}]\n{code}"
    lines = asked(package, code).splitlines()
    assert lines[:4] == [str(({}, "", f"{native.LIBRARY.name} is cut off; {AGAIN}"))] * 4
    assert len(lines) == 4 + 3
    assert all(AGAIN in foreign for foreign in lines[4:])


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XFORMER_NATIVE", "0")
    assert native._loaded() == ({}, "", native.OFF)
    monkeypatch.setattr(native, "absent", native.OFF)
    assert native.note(torch.device("cpu")) == ""


def test_elsewhere_the_library_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XFORMER_NATIVE", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert native._loaded() == ({}, "", native.ELSEWHERE)
    monkeypatch.setattr(native, "absent", native.ELSEWHERE)
    assert native.note(torch.device("cpu")) == native.note(torch.device("cuda")) == ""
