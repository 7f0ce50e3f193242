"""Files written at one go: what is on the disk is what was given, whatever the system does."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer.data.files import PIECE, write_all, write_file

AROUND = getattr(os, "O_DIRECT", 0)  # of Linux


@pytest.mark.parametrize(
    "sizes",
    [
        [0],
        [1],
        [3, 0, 5],
        [PIECE],
        [PIECE - 1],
        [PIECE + 1],
        [2 * PIECE],
        [7, PIECE, 4096, 3 * PIECE + 13, 1],
    ],
)
@pytest.mark.parametrize("refuses", ["nothing", "the flag", "the write"])
def test_a_written_file(
    sizes: list[int], refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and with its checksum, also where the file system knows no way around its cache."""
    values = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
    parts = [part.data for part in np.split(values, np.cumsum(sizes)[:-1])]
    real = fcntl.fcntl

    def control(file: Any, command: int, flags: int = 0) -> int:
        if refuses == "the flag" and flags & AROUND:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, command, flags)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", control)
        if refuses == "the write":
            patch.setattr(Path, "open", lambda path, *_: Unable(path, "wb"))
        found = write_file(tmp_path / "file", parts)
    assert found == hashlib.sha256(values.data).hexdigest()
    assert (tmp_path / "file").read_bytes() == values.tobytes()


class Unable(FileIO):
    """A file whose system takes the flag and then refuses to write with it."""

    def write(self, data: Any, /) -> int:
        if fcntl.fcntl(self, fcntl.F_GETFL) & AROUND:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write(data)


class Short(FileIO):
    """A file that takes a third of what it is given, and in the end no more."""

    room = 2 * PIECE

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        count = super().write(view[: min(len(view) // 3 + 1, self.room - self.tell())])
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return count


def test_short_writes_and_a_full_disk(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 256, 3 * PIECE, np.uint8)
    with Short(tmp_path / "file", "wb") as file:
        write_all(file, values[:PIECE].data)
        assert (tmp_path / "file").read_bytes() == values[:PIECE].tobytes()
        with pytest.raises(OSError, match="No space left"):
            write_all(file, values[PIECE:].data)
    assert (tmp_path / "file").stat().st_size == 2 * PIECE
