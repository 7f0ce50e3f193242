"""What every reader of a format shares: checked inputs, lines with their numbers, documents cut
into rows, the record of what was read. All of it streams: memory does not grow with the input.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xformer.data.errors import BadInput, lacks
from xformer.data.files import file_checksum
from xformer.data.writing import SplitWriter

from .bad import BadRows

BATCH = 2**20  # characters encoded at once
PACKED = (".gz", ".zst")  # endings of packed files


def check_files(paths: Iterable[Path]) -> None:
    """Raise BadInput naming the first path that is missing, empty, or no file."""
    for path in paths:
        if path.is_dir():
            raise BadInput(f"{path} is a directory; give a file")
        if not path.exists():
            raise BadInput(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise BadInput(f"{path} is empty")


def sources(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Name (below the folder that holds them all), size and SHA-256 of every file, for the store's
    origin."""
    folder = os.path.commonpath([path.absolute().parent for path in paths])
    return [
        {
            "file": path.absolute().relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": file_checksum(path),
        }
        for path in paths
    ]


def open_binary(path: Path, read: Callable[[int], None] = lambda _: None) -> BinaryIO:
    """A file's bytes, unpacked on the way where its name ends in .gz or .zst.

    `read` is told how many bytes were read from the disk. Reading raises BadInput naming the file
    where the packed data is damaged or ends too early, and where `zstandard` is not installed.
    """
    blocks = _disk(path, read)
    if path.suffix == ".gz":
        blocks = _unpack(path, blocks, lambda: zlib.decompressobj(wbits=31), zlib.error)
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise lacks(str(path), "zstandard", "formats") from None
        machine = zstandard.ZstdDecompressor()
        blocks = _unpack(path, blocks, machine.decompressobj, zstandard.ZstdError)
    return io.BufferedReader(_Blocks(blocks), 2**16)


def plain_name(path: Path) -> Path:
    """The file's name without the ending of its packing."""
    return path.with_suffix("") if path.suffix in PACKED else path


def _disk(path: Path, read: Callable[[int], None]) -> Iterator[bytes]:
    # what one block of packed bytes may become is bounded (by 128 KiB for every 4 bytes of zstd)
    size = 2**12 if path.suffix in PACKED else 2**16
    with path.open("rb") as file:
        while block := file.read(size):
            read(len(block))
            yield block


def _unpack(
    path: Path, blocks: Iterator[bytes], new: Callable[[], Any], damage: type[Exception]
) -> Iterator[bytes]:
    """The bytes of one packed stream after the other, as `cat a.gz b.gz` makes them."""
    machine = new()
    try:
        for block in blocks:
            while block:
                if machine.eof:
                    block = block.lstrip(b"\0")  # padding of tapes
                    if not block:
                        break
                    machine = new()
                yield machine.decompress(block)
                block = machine.unused_data if machine.eof else b""
    except damage as error:
        raise BadInput(f"{path} is damaged, or no {path.suffix} file: {error}") from None
    if not machine.eof:
        raise BadInput(f"{path} ends too early: it is not whole")


class _Blocks(io.RawIOBase):
    """A file over an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]):
        self.blocks, self.rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.rest:
            block = next(self.blocks, None)
            if block is None:
                return 0
            self.rest = memoryview(block)
        view = memoryview(buffer)
        size = min(len(view), len(self.rest))
        view[:size] = self.rest[:size]
        self.rest = self.rest[size:]
        return size


def read_lines(
    path: Path, bad: BadRows | None = None, read: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 file, which may be packed; a byte-order
    mark is dropped.

    A line that is not UTF-8 goes to `bad` (default: raises BadInput naming file and line). `read`
    is told how many bytes were read from the disk.
    """
    bad = BadRows(skip=False) if bad is None else bad  # an empty one is falsy
    with open_binary(path, read) as file:
        number = 0
        for line in file:  # `enumerate` would hold on to a line, which may be long
            number += 1
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad(path, number, not_utf8(error))
                continue
            line = b""
            text = text.removesuffix("\n").removesuffix("\r")
            yield number, text


def not_utf8(error: UnicodeDecodeError) -> str:
    """Why a line cannot be read, and what helps."""
    return f"not valid UTF-8 ({error.reason}); convert the file to UTF-8"


class RowCutter:
    """Cuts documents, which arrive in segments, into rows of at most `max_tokens` ids.

    A document of n ids gives ceil(n / max_tokens) rows, all full but its last; a row never
    crosses a document, and a document without ids gives none. Where the split has a column `group`,
    it gets the number of each row's document.
    """

    def __init__(self, split: SplitWriter, max_tokens: int):
        self.split, self.max_tokens = split, max_tokens
        self.rest = np.empty(0, np.int32)  # of the unfinished document; less than one row
        self.number = 0  # of the unfinished document

    def add(self, ids: np.ndarray, lengths: np.ndarray, ends: Sequence[bool]) -> None:
        """Segments in order: their ids end to end, how many each has, does it end its document?"""
        values = np.concatenate([self.rest, ids])
        stops = (np.cumsum(lengths) + len(self.rest))[np.asarray(ends, bool)]
        stops = np.concatenate([[0], stops])
        open_ids = len(values) - stops[-1]
        whole = open_ids - open_ids % self.max_tokens
        self._write(values[: stops[-1] + whole], np.append(np.diff(stops), whole))
        self.rest = values[stops[-1] + whole :].copy()

    def _write(self, values: np.ndarray, documents: np.ndarray) -> None:
        numbers = self.number + np.flatnonzero(documents > 0)
        self.number += len(documents) - 1
        documents = documents[documents > 0]
        counts = -(-documents // self.max_tokens)
        rows = np.full(counts.sum(), self.max_tokens, np.int64)
        rows[np.cumsum(counts) - 1] = documents - (counts - 1) * self.max_tokens
        self.split.append_ragged("tokens", values, rows)
        if "group" in self.split.writers:
            self.split.append("group", np.repeat(numbers, counts))
