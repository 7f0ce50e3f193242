"""How the C++ library is compiled and loaded, and what happens if that is impossible."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from xformer.ops import native

PLAIN = {k: v for k, v in os.environ.items() if k not in ("XFORMER_NATIVE", "CXX")}
AGAIN = "install xformer again on this machine"
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


def asked(package: Path, code: str = "", **environment: str) -> str:
    """What a new process reports about the copy's library after using it."""
    code = code or (
        "import torch\n"
        "from xformer.ops import native\n"
        "x = torch.ones(2, 3)\n"
        "if not native.absent:\n"
        "    native.call('dropout', x.dtype, x, y := torch.empty(2, 3), 2, 3, 0.0, None)\n"
        "    assert torch.equal(x, y)\n"
        "print(native.absent, native.note(torch.device('cpu')), sep='|')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package,
        capture_output=True,
        text=True,
        env={**PLAIN, "PYTHONPATH": f"{package}:{ROOT / 'tests'}", **environment},
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
    return f"{why}|no C++ operations ({why}): steps take up to twice as long"


@linux
def test_the_suite_has_the_library() -> None:
    """Without the library, the suite would test only the plain versions of the operations."""
    assert native.absent in ("", native.OFF)


@linux
def test_a_library_is_compiled_and_loaded(package: Path) -> None:
    not_there = said(f"they were not compiled; {AGAIN}, with a C++ compiler")
    assert asked(package) == not_there
    compiled(package)
    assert asked(package) == "|"
    assert asked(package, XFORMER_NATIVE="0") == "XFORMER_NATIVE=0|"
    made = [x.name for x in (package / "xformer/ops").iterdir() if "native" in x.name]
    assert sorted(made) == sorted([native.LIBRARY.name, "native.cpp", "native.py"])


@linux
@pytest.mark.parametrize(
    "text",
    [
        "",
        '[ "$1" = --version ] && exit 0; echo "error: no" >&2; exit 1',
        "printf '\\377'",
        "exit 0",
    ],
)
def test_without_a_compiler_the_installation_goes_on(package: Path, text: str) -> None:
    compiler = wrapped(package, text) if text else "/nowhere/c++"
    assert "_native" in compiled(package, compiler)
    assert asked(package) == said(f"they were not compiled; {AGAIN}, with a C++ compiler")


@linux
def test_a_library_of_another_source_is_not_used(package: Path) -> None:
    compiled(package)
    with (package / "xformer/ops/native.cpp").open("a", encoding="utf-8") as file:
        file.write("// changed\n")
    assert asked(package) == said(f"native.cpp has changed since it was compiled; {AGAIN}")


@linux
def test_a_library_for_another_processor_is_not_used(package: Path) -> None:
    features = "hypervisor avx0 avx1 fma9 sse9"
    other = f"""exec c++ "$@" -UXFORMER_PROCESSOR '-DXFORMER_PROCESSOR="{features}"'"""
    compiled(package, wrapped(package, other))
    actual = asked(package)
    assert actual == said(f"they were compiled for a processor with avx0 avx1 fma9 ...; {AGAIN}")


@linux
def test_a_library_that_is_no_library_is_not_used(package: Path) -> None:
    (package / "xformer/ops" / native.LIBRARY.name).write_bytes(b"nothing of the kind")
    assert AGAIN in asked(package)


@linux
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
def test_a_library_that_is_cut_off_is_not_used(package: Path, share: float) -> None:
    """Loading it would end Python with SIGBUS."""
    content = native.LIBRARY.read_bytes()
    (package / "xformer/ops" / native.LIBRARY.name).write_bytes(
        content[: int(share * len(content))]
    )
    assert asked(package) == said(f"{native.LIBRARY.name} is cut off; {AGAIN}")


@linux
@pytest.mark.skipif(platform.machine() != "x86_64", reason="-mno-avx512f is for x86-64")
def test_a_processor_without_avx512_computes_the_same(package: Path) -> None:
    compiled(package, wrapped(package, 'exec c++ "$@" -mno-avx512f'))
    code = (
        "import torch, test_ops\n"
        "assert not test_ops.native.absent and 'copy' in test_ops.native.__file__\n"
        "equals = test_ops.test_a_way_equals_the_plain_one_in_fp64\n"
        "for case in test_ops.CASES:\n"
        "    for rate in (0.0, test_ops.RATE):\n"
        "        equals(case, 'C++', torch.float32, rate)\n"
        "print('same')"
    )
    assert asked(package, code) == "same"


@linux
def test_there_is_one_openmp(package: Path) -> None:
    """The library uses PyTorch's OpenMP. With two OpenMP libraries, each would start its own
    threads.
    """
    compiled(package)
    code = (
        "import re\n"
        "from xformer.ops import native\n"
        "assert not native.absent, native.absent\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len(set(re.findall(r'\\S*/lib[gi]?omp[^/]*$', maps, re.M))))"
    )
    assert asked(package, code) == "1"


def test_elsewhere_the_library_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XFORMER_NATIVE", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert native._loaded() == ({}, "", native.ELSEWHERE)
    monkeypatch.setattr(native, "absent", native.ELSEWHERE)
    assert native.note(torch.device("cpu")) == native.note(torch.device("cuda")) == ""
