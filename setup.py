"""Declares the packages and the C++ operations. pyproject.toml declares everything else.

Two folders of the checkout are installed inside the package xformer: preprocess/ with its
subpackages as xformer.preprocess, and recipes/ as data. xformer/ops/native.cpp is compiled for the
processor of this machine, or for all that have the features of $XFORMER_MARCH, such as x86-64-v3.
Set $CXX to use a compiler other than c++. If it cannot be compiled, the installation continues
without it.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

SOURCE = "xformer/ops/native.cpp"
FLAGS = [
    *("-std=c++17", "-O3", "-march={}", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC"),
]
# kinds of processors that share a build -> their features, by Linux's names
V2 = "popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"
LEVELS = {"x86-64-v2": V2, "x86-64-v3": V3, "x86-64-v4": V4}


class BuildAfresh(build_py):
    """Copies the modules without those of an earlier build, which may have been deleted since."""

    def run(self) -> None:
        made = Path(self.build_lib).resolve()
        if made.parent == Path("build").resolve():
            shutil.rmtree(made, ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """Compiles native.cpp, and records in the library its source, compiler and processor."""

    def build_extension(self, extension: Extension) -> None:
        """Raises CompileError if it fails; setuptools then installs without the library."""
        try:
            self.compile(extension)
        except (OSError, ValueError) as error:
            raise CompileError(str(error)) from None

    def compile(self, extension: Extension) -> None:
        out = Path(self.get_ext_fullpath(extension.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        march = os.environ.get("XFORMER_MARCH", "native")
        if march not in ("native", *LEVELS):
            sys.exit(f"XFORMER_MARCH={march}: give one of native, {', '.join(LEVELS)}")
        if march in LEVELS and platform.machine() != "x86_64":
            sys.exit(f"XFORMER_MARCH={march}: this machine is not x86-64; give native")
        features = LEVELS.get(march) or processor_features()
        # For some of these processors, GCC would choose vectors of half the width.
        wide = ["-mprefer-vector-width=512"] if "avx512f" in features.split() else []
        flags = [*(flag.format(march) for flag in FLAGS), *wide]
        version = run([*compiler, "--version"])
        source = hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()
        build = hashlib.sha256("\0".join([source, version, *flags, features]).encode())
        facts = {"SOURCE": source, "PROCESSOR": features, "BUILD": build.hexdigest()[:16]}
        defined = [f"-DXFORMER_{name}={json.dumps(value)}" for name, value in facts.items()]
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            made, library = Path(folder) / "native.o", Path(folder) / "native.so"
            run([*compiler, *flags, *defined, "-c", SOURCE, "-o", str(made)])
            # There is no -fopenmp here: the library must use the OpenMP that torch has loaded.
            run([*compiler, "-shared", str(made), "-o", str(library)])
            library.replace(out)


def processor_features() -> str:
    """The features of this processor, by Linux's names."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x[:5] in ("flags", "Featu")), "")


def run(command: list[str]) -> str:
    """The output of a command. Raises CompileError if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=300
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]}: {error}") from None
    if ended.returncode:
        raise CompileError(f"{command[0]} failed: {ended.stderr[-2000:]}")
    return ended.stdout


setup(
    packages=[
        *find_packages(include=["xformer", "xformer.*"]),  # includes the bridge xformer.preprocess
        *(f"xformer.preprocess.{name}" for name in find_packages("preprocess")),
        "xformer.recipes",
    ],
    package_dir={"xformer.preprocess": "preprocess", "xformer.recipes": "recipes"},
    ext_modules=[Extension("xformer.ops._native", [SOURCE], optional=True)]
    if sys.platform == "linux"
    else [],
    cmdclass={"build_ext": BuildNative, "build_py": BuildAfresh},
)
