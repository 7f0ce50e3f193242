"""Faults inside a process. Every operation that it does on files is counted. At a given one the
process dies, the machine loses its power, or the disk is full, fails or is read-only.

A process that tests.helpers.Forks starts is armed by `before=armed(place, fault, number)`. Python's
writes go through a file object of our own, so that half of one can be written.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

COUNT, KILL, POWER, SHORT = "count", "kill", "power", "short"
ERRORS = {"full": errno.ENOSPC, "error": errno.EIO, "read-only": errno.EROFS}
OPERATIONS = (
    "open",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "fsync",
    "link",
    "symlink",
    "truncate",
    "ftruncate",
)
_real = {name: getattr(os, name) for name in OPERATIONS}
_open = io.open


def armed(place: Path, fault: str, number: int = 0, once: bool = False) -> str:
    """Python that arms a process: `fault` happens at operation `number` on files below `place`.

    An error also happens at all later operations, unless `once` is set.
    """
    return (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"from faults.inject import Armed\nArmed({str(place)!r}, {fault!r}, {number}, {once})\n"
    )


class Armed:
    """Intercepts all operations of this process on files below `place`."""

    def __init__(self, place: str, fault: str, number: int, once: bool):
        self.place, self.fault, self.number, self.once = place, fault, number, once
        self.seen = 0
        self.lock = threading.RLock()  # several threads of a run work on files
        self.safe: dict[int, int] = {}  # inode -> bytes that are safely on the disk
        for directory, _, names in os.walk(place):
            for name in names:
                status = os.stat(os.path.join(directory, name))
                self.safe[status.st_ino] = status.st_size
        for name, call in _real.items():
            setattr(os, name, self._wrapped(name, call))
        io.open = builtins.open = self._opened

    # ------------------------------------------------------------------------ what happens when

    def point(self, what: str, half: Callable[[], Any] | None = None) -> None:
        """An operation is about to be done; `half` does half of it."""
        with self.lock:  # while the process dies, no other thread does anything on files
            self._point(what, half)

    def _point(self, what: str, half: Callable[[], Any] | None) -> None:
        number, self.seen = self.seen, self.seen + 1
        if self.fault == COUNT:
            _real_write(f"{what}\n")
        hit = number == self.number
        if self.fault in (KILL, POWER) and hit:
            self._die(half)
        if self.fault in ERRORS and (hit or (number > self.number and not self.once)):
            if half is not None and self.fault == "full":
                half()
            code = ERRORS[self.fault]
            raise OSError(code, os.strerror(code), what.partition(" ")[2])

    def _die(self, half: Callable[[], Any] | None) -> None:
        if half is not None:
            half()
        if self.fault == POWER:  # what was not synced is lost
            for directory, _, names in os.walk(self.place):
                for name in names:
                    path = os.path.join(directory, name)
                    with suppress(FileNotFoundError):  # a thread was already in its operation
                        status = os.stat(path)
                        kept = self.safe.get(status.st_ino, 0)
                        if status.st_size > kept:
                            _real["truncate"](path, kept)
        os.kill(os.getpid(), signal.SIGKILL)

    # ------------------------------------------------------------------------------ the wrappers

    def _below(self, path: Any) -> str | None:
        """The path as a string, if it lies below the place."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        text = os.path.abspath(os.fsdecode(path))
        return text if text == self.place or text.startswith(self.place + os.sep) else None

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any, *arguments: Any, **options: Any) -> Any:
            directory = options.get("dir_fd")
            known = path if directory is None else f"/proc/self/fd/{directory}/{os.fsdecode(path)}"
            inside = self._below(known) or (directory is not None and self._below(directory))
            flags = arguments[0] if arguments and name == "open" else options.get("flags", 0)
            writes = name != "open" or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if inside and writes:
                self.point(f"{name} {inside}")
            done = call(path, *arguments, **options)
            if name == "fsync" and inside:
                status = os.fstat(path) if isinstance(path, int) else os.stat(path)
                self.safe[status.st_ino] = status.st_size
            return done

        return wrapper

    def _opened(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        plain = isinstance(file, int) or opener is not None or not set(mode) & set("wax+")
        if plain or not (path := self._below(file)):
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        self.point(f"open {path}")
        raw = _Raw(path, mode.replace("b", "").replace("t", ""))
        raw.owner = self
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)


class _Raw(io.FileIO):
    """A file that announces each write before it happens."""

    owner: Armed

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if self.owner.fault == SHORT and len(view) > 1:
            view = view[: (len(view) + 1) // 2]
        if len(view) > 1:
            self.owner.point(f"begin {self.name!s}")
        half = view[: len(view) // 2]
        self.owner.point(f"write {self.name!s}", lambda: super(_Raw, self).write(half))
        return super().write(view)


def _real_write(text: str) -> None:
    """Write to standard output without buffering."""
    os.write(1, text.encode())
