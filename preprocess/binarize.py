"""What the readers of all formats share: checked and decompressed input files, numbered lines, the
record of the files that were read, and cutting documents into rows.

Everything is read as a stream, so memory does not grow with the size of the input.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xformer.data.errors import BadInput, lacks
from xformer.data.files import file_checksum, near
from xformer.data.writing import SplitWriter

from .bad import STRICT, BadRows

BATCH = 2**20  # characters encoded at once
PACKED = (".gz", ".zst")  # endings of compressed files
# In UTF-16 about every second byte of Latin, Arabic or Thai is one of these. NUL is among them, and
# is always the first or always the second byte of a character.
CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a]")
ISO_2022 = re.compile(rb"\x1b\$[@AB(]")  # the escapes before Japanese, Chinese or Korean
UNREAD = (".tar", ".tgz", ".zip", ".bz2", ".xz", ".7z")  # endings of files that must be unpacked


def check_exists(path: Path) -> None:
    """Raise BadInput if there is nothing at a path."""
    if not path.exists():
        raise BadInput(f"{path} does not exist{near(path, folders=False)}")


def check_files(paths: Iterable[Path]) -> None:
    """Raise BadInput naming the first path that is not a file, or is an empty one or an archive."""
    for path in paths:
        if path.is_dir():
            raise BadInput(f"{path} is a directory; give a file")
        check_exists(path)
        if not path.is_file():
            raise BadInput(f"{path} is a device or a pipe, which cannot be read twice; give a file")
        if unpacked_name(path).suffix.lower() in UNREAD:
            raise BadInput(f"{path} is packed in a form that is not read; unpack it first")
        if path.stat().st_size == 0:
            raise BadInput(f"{path} is empty")


def sources(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, size in bytes and SHA-256 of every file, for the store's origin.

    Names are relative to the innermost folder that contains all the files.
    """
    folder = os.path.commonpath([path.absolute().parent for path in paths])
    return [
        {
            "file": os.path.relpath(path, folder),
            "bytes": path.stat().st_size,
            "sha256": file_checksum(path),
        }
        for path in paths
    ]


def open_binary(path: Path, advance: Callable[[int], None] = lambda _: None) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its name ends in .gz or .zst.

    `advance` is called with the size of each block read from the disk. Raises BadInput naming the
    file if `zstandard` is needed and not installed, if the file is not UTF-8 although it could be
    read as such, and, while reading, if the compressed data is damaged or ends too early.
    """
    blocks, packed = _disk(path, advance), path.suffix.lower()
    if packed == ".gz":
        blocks = _decompress(path, blocks, lambda: zlib.decompressobj(wbits=31), zlib.error)
    elif packed == ".zst":
        try:
            import zstandard
        except ImportError:
            raise lacks(str(path), "zstandard", "formats") from None
        decompressor = zstandard.ZstdDecompressor()
        blocks = _decompress(path, blocks, decompressor.decompressobj, zstandard.ZstdError)
    file = io.BufferedReader(_Blocks(blocks), 2**16)
    head = file.peek()
    places = {match.start() % 2 for match in re.finditer(b"\0", head)}
    if len(places) == 1 and len(CONTROLS.findall(head)) > 8 + len(head) // 20:
        raise BadInput(f"{path} looks like UTF-16: convert it to UTF-8")
    if len(ISO_2022.findall(head)) > 3:
        raise BadInput(f"{path} holds escapes of ISO-2022-JP or the like: convert it to UTF-8")
    return file


def unpacked_name(path: Path) -> Path:
    """The path without the ending .gz or .zst."""
    return path.with_suffix("") if path.suffix.lower() in PACKED else path


def _disk(path: Path, advance: Callable[[int], None]) -> Iterator[bytes]:
    # Every 4 bytes of zstd may grow to 128 KiB, so compressed files are read in small blocks.
    size = 2**12 if path.suffix.lower() in PACKED else 2**16
    with path.open("rb") as file:
        while block := file.read(size):
            advance(len(block))
            yield block


def _decompress(
    path: Path, blocks: Iterator[bytes], new: Callable[[], Any], damage: type[Exception]
) -> Iterator[bytes]:
    """Decompress a file that may hold several streams, as `cat a.gz b.gz` makes.

    `new` makes a decompressor for one stream. `damage` is what it raises on damaged data.
    """
    decompressor = new()
    try:
        for block in blocks:
            while block:
                if decompressor.eof:
                    block = block.lstrip(b"\0")  # some archives end in zeros
                    if not block:
                        break
                    decompressor = new()
                yield decompressor.decompress(block)
                block = decompressor.unused_data if decompressor.eof else b""
    except damage as error:
        raise BadInput(f"{path} is damaged, or not a {path.suffix} file: {error}") from None
    if not decompressor.eof:
        raise BadInput(f"{path} ends too early: it was cut off; copy or download it again")


class _Blocks(io.RawIOBase):
    """Presents an iterator of blocks as a file."""

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
    path: Path, bad: BadRows = STRICT, advance: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its line end) of a UTF-8 file.

    The file may be compressed (see `open_binary`). A byte-order mark is dropped. A line that is not
    UTF-8 goes to `bad` (default: raises BadInput naming file and line). `advance` is called with
    the size of each block read from the disk.
    """
    with open_binary(path, advance) as file:
        number = 0
        for line in file:  # not `enumerate`, which would keep a second reference to a long line
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
    """The reason to give for a line that is not UTF-8, with the remedy."""
    return f"not valid UTF-8 ({error.reason}); convert the file to UTF-8"


class RowCutter:
    """Cuts documents, which arrive in segments, into rows of at most `max_tokens` ids.

    A document of n ids gives ceil(n / max_tokens) rows, and all but the last are full. A row never
    crosses a document boundary. A document without ids gives no row. If the split has a column
    `group`, it receives the number of each row's document.
    """

    def __init__(self, split: SplitWriter, max_tokens: int):
        self.split, self.max_tokens = split, max_tokens
        self.rest = np.empty(0, np.int32)  # ids of the unfinished document, fewer than a row
        self.number = 0  # the number of the unfinished document

    def add(self, ids: np.ndarray, lengths: np.ndarray, ends: Sequence[bool]) -> None:
        """Add segments in order.

        `ids` holds the ids of all segments one after the other, `lengths` the number of ids in
        each segment, and `ends` whether a segment ends its document.
        """
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
