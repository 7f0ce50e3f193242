"""What every reader of a format shares: checked inputs, lines with their numbers, documents cut
into rows, the record of what was read. All of it streams: memory does not grow with the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.errors import BadInput
from xformer.data.files import file_checksum
from xformer.data.store import SplitWriter

BATCH = 2**20  # characters encoded at once


def check_files(paths: Iterable[Path]) -> None:
    """Raise BadInput naming the first path that is missing, empty, or no file."""
    for path in paths:
        if path.is_dir():
            raise BadInput(f"{path} is a directory; give a file")
        if not path.exists():
            raise BadInput(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise BadInput(f"{path} is empty")


def sources(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of every file, for the store's origin."""
    return [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": file_checksum(path)}
        for path in paths
    ]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 file; a byte-order mark is dropped.

    Raises BadInput naming file and line where the bytes are not UTF-8.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(path, number, error) from None
            yield number, text.removesuffix("\n").removesuffix("\r")


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> BadInput:
    """The one line that says where a file stops being UTF-8."""
    return BadInput(f"{path}:{line}: not valid UTF-8 ({error.reason}); convert the file to UTF-8")


class RowCutter:
    """Cuts documents, which arrive in segments, into rows of at most `max_tokens` ids.

    A document of n ids gives ceil(n / max_tokens) rows, all full but its last; a row never
    crosses a document, and a document without ids gives none.
    """

    def __init__(self, split: SplitWriter, max_tokens: int):
        self.split, self.max_tokens = split, max_tokens
        self.rest = np.empty(0, np.int32)  # of the unfinished document; less than one row

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
        documents = documents[documents > 0]
        counts = -(-documents // self.max_tokens)
        rows = np.full(counts.sum(), self.max_tokens, np.int64)
        rows[np.cumsum(counts) - 1] = documents - (counts - 1) * self.max_tokens
        self.split.append_ragged("tokens", values, rows)
