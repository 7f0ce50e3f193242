"""HDF5 files of strangers, read by a process of its own.

A file made for it can keep the HDF5 library busy without end, crash it or fill the memory, which
nothing in the same process could stop. Here the system stops a process that does nothing but read
(`python -m xformer.analysis.hdf5 SECONDS`), and all that comes back are numbers and text.

It takes a request a line, as JSON, and answers with a line of JSON; an array's bytes follow it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

SECONDS = 60  # that an answer may take
MEMORY = 2**30  # bytes of the reading process, and of an array
LINE = 2**24  # bytes of an answer's line


@dataclass(frozen=True)
class Dataset:
    """What a file says of a dataset: `source` is the first file that a virtual one reads."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source: str = ""


class HDF5:
    """Reads HDF5 files as long as it is open; the process starts with the first one.

    Every method raises OSError with one line where a file is absent, damaged, or made for harm.
    """

    def __enter__(self) -> HDF5:
        self.process: subprocess.Popen[bytes] | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def attributes(self, path: Path) -> dict[str, Any]:
        """The file's attributes that are text or single numbers."""
        return dict(self._ask(path, "attributes"))

    def datasets(self, path: Path) -> dict[str, Dataset]:
        """Its datasets of numbers by their whole names."""
        found = self._ask(path, "datasets")
        return {
            str(name): Dataset(tuple(map(int, shape)), _numeric(dtype), str(source))
            for name, (shape, dtype, source) in found.items()
        }

    def read(self, path: Path, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a dataset of numbers."""
        shape, text = self._ask(path, "read", name, start, stop)
        dtype = _numeric(text)
        size = prod(shape) * dtype.itemsize
        if not 0 <= size <= MEMORY:
            raise OSError(f"{name} has {size:,} bytes")
        assert self.process is not None
        assert self.process.stdout is not None
        content = self.process.stdout.read(size)
        if len(content) < size:
            raise self._died()
        return np.frombuffer(bytearray(content), dtype).reshape(shape)

    def _ask(self, path: Path, *request: Any) -> Any:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(SECONDS)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([str(path.absolute()), *request]).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline(LINE)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["found"]

    def _died(self) -> OSError:
        """What to raise when the process has ended, or says too much; the next file has another."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate()
        status, self.process = self.process.returncode, None
        if status == -signal.SIGALRM:
            return OSError(f"the HDF5 library was not done with it after {SECONDS} s")
        return OSError("the HDF5 library crashed on it")


def _numeric(text: str) -> np.dtype:
    dtype = np.dtype(text)
    if dtype.kind not in "fiu":
        raise OSError(f"it holds {text}, no numbers")
    return dtype


# --------------------------------------------------------------------- the process that reads


def _attributes(h5: Any) -> dict[str, Any]:
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in h5.attrs.items()}
    return {k: v for k, v in plain.items() if isinstance(v, str | int | float)}


def _datasets(h5: Any) -> dict[str, Any]:
    found = {}

    def note(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and node.dtype.kind in "fiu":
            source = node.virtual_sources()[0].file_name if node.is_virtual else ""
            found[name] = (node.shape, node.dtype.str, source)

    h5.visititems(note)
    return found


def serve(seconds: int) -> None:
    """Answer requests until there are no more, each within so many seconds."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the system ends us, whatever we are doing
    path, h5 = "", None
    for line in sys.stdin.buffer:
        signal.alarm(seconds)
        wanted, what, *which = json.loads(line)
        content = b""
        try:
            if h5 is None or wanted != path:
                path, h5 = wanted, h5py.File(wanted)
            if what == "attributes":
                found: Any = _attributes(h5)
            elif what == "datasets":
                found = _datasets(h5)
            else:
                name, start, stop = which
                values = np.ascontiguousarray(h5[name][start:stop])
                _numeric(values.dtype.str)
                found, content = (values.shape, values.dtype.str), values.tobytes()
            answer = json.dumps({"found": found}).encode()
        except Exception as error:  # whatever the library makes of a damaged file
            reason = str(error).partition("\n")[0] or type(error).__name__
            answer, content = json.dumps({"error": reason}).encode(), b""
        signal.alarm(0)
        sys.stdout.buffer.write(answer + b"\n" + content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
