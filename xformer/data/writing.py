"""Writes a store row by row. The store appears only when it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xformer.data import tokenizers
from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import (
    atomic_directory,
    block_checksums,
    file_checksum,
    load_array,
    write_json,
)
from xformer.data.store import FORMAT, HEADER, SUMS, TEXTS

NARROWED = 2**20  # offsets that are rewritten at a time
WHOLE_WORDS = (  # ends the warning on unknown tokens if they stand for much text
    "; WordPiece makes one [UNK] of a whole word with an unknown character, or with more than 100 "
    "characters; for text without spaces, such as Thai, train --kind unigram or bpe"
)


class NpyWriter:
    """Writes a .npy file piece by piece, in constant memory.

    A dtype such as "(2,)i4" gives rows of two values. The file is not memory-mapped, because on a
    full disk a write to a memory map kills the process.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype, self.shape, self.length = path, dtype.base, dtype.shape, 0
        self.file: BinaryIO = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        descr, shape = np.lib.format.dtype_to_descr(self.dtype), (self.length, *self.shape)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)
        assert self.file.tell() == HEADER

    def append(self, values: np.ndarray) -> None:
        """Write more values, or rows of values."""
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += len(values)

    def close(self) -> None:
        """Finish the file by writing the header again with the final length."""
        self.file.seek(0)
        self._write_header()
        self.file.close()


def _narrow(path: Path) -> None:
    """Rewrite a file of int64 offsets as int32, which halves its size."""
    values = load_array(path, mapped=True)
    writer = NpyWriter(path.with_suffix(".narrow"), np.dtype(np.int32))
    for start in range(0, len(values), NARROWED):
        writer.append(values[start : start + NARROWED])
    writer.close()
    writer.path.replace(path)


class SplitWriter:
    """Appends rows to a split. Set `words` to record the number of words in the raw text.

    `unk` is the id of what the tokenizer does not know. `unknown_tokens` counts the tokens with
    this id, and `unknown_rows` the texts that hold nothing else. `characters` and
    `unknown_characters` are those of the raw text, if the caller counts them.
    """

    def __init__(
        self, directory: Path, columns: dict[str, np.dtype], ragged: Sequence[str], unk: int
    ):
        directory.mkdir()
        self.directory = directory
        self.words: int | None = None
        self.unk, self.unknown_tokens, self.unknown_rows = unk, 0, 0
        self.characters = self.unknown_characters = 0
        self.writers = {c: NpyWriter(directory / f"{c}.npy", t) for c, t in columns.items()}
        int64 = np.dtype(np.int64)
        self.offsets = {c: NpyWriter(directory / f"{c}.offsets.npy", int64) for c in ragged}
        for writer in self.offsets.values():
            writer.append(np.zeros(1, np.int64))

    def append(self, column: str, values: np.ndarray) -> None:
        """Append rows of a plain column."""
        self.writers[column].append(values)

    def append_texts(self, column: str, texts: Sequence[str]) -> None:
        """Append texts to a ragged column of UTF-8 bytes."""
        parts = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        self.append_ragged(column, np.frombuffer(b"".join(parts), np.uint8), lengths)

    def append_ragged(self, column: str, values: np.ndarray, lengths: np.ndarray) -> None:
        """Append rows to a ragged column: their concatenated `values`, and each row's length."""
        if column in TEXTS:
            self._count_unknown(values, lengths)
        ends = self.writers[column].length + np.cumsum(lengths, dtype=np.int64)
        self.writers[column].append(values)
        self.offsets[column].append(ends)

    def _count_unknown(self, values: np.ndarray, lengths: np.ndarray) -> None:
        unknown = np.asarray(values) == self.unk
        if not unknown.any():
            return
        ends = np.concatenate([[0], np.cumsum(lengths)])
        in_row = np.diff(np.concatenate([[0], np.cumsum(unknown)])[ends])
        self.unknown_tokens += int(unknown.sum())
        self.unknown_rows += int(((in_row == np.diff(ends)) & (in_row > 0)).sum())

    def count_characters(self, characters: int, unknown: int) -> None:
        """Count the characters of texts, and those of them that became unknown tokens."""
        self.characters += characters
        self.unknown_characters += unknown

    @property
    def hides_text(self) -> bool:
        """Whether the unknown tokens stand for more of the text than their number says."""
        tokens = sum(self.writers[c].length for c in TEXTS if c in self.offsets)
        most = max(tokenizers.UNKNOWN * tokens, 2 * self.unknown_tokens)
        return self.unknown_characters * tokens > most * self.characters

    def unknown(self) -> str:
        """How much of the split the tokenizer does not know, as `unknown_warning` takes it. "" if
        it is at most the share UNKNOWN of the tokens and of the texts, and hides no text."""
        columns = [column for column in TEXTS if column in self.offsets]
        tokens = sum(self.writers[column].length for column in columns)
        rows = sum(self.offsets[column].length - 1 for column in columns)
        limit = tokenizers.UNKNOWN
        much = self.unknown_tokens > limit * tokens or self.unknown_rows > limit * rows
        if not much and not self.hides_text:
            return ""
        alone = f" (all tokens of {self.unknown_rows:,} texts)" if self.unknown_rows else ""
        share = f"{100 * self.unknown_tokens / tokens:.3g} % of the tokens"
        if self.hides_text:
            share += f" and {100 * self.unknown_characters / self.characters:.3g} % of the text"
        return f"{share} of {self.directory.name}{alone}"

    def close(self) -> None:
        """Finish the files of all columns."""
        for writer in [*self.writers.values(), *self.offsets.values()]:
            writer.close()
        for column, writer in self.offsets.items():
            if self.writers[column].length < 2**31:
                _narrow(writer.path)

    def describe(self) -> dict[str, Any]:
        """The split's entry in store.json: its rows, tokens, tables, files and their checksums."""
        lengths: dict[str, set[int]] = {}  # by table; "" is the split itself
        for column, writer in self.writers.items():
            ends = self.offsets.get(column)
            table = column.partition(".")[0] if "." in column else ""
            lengths.setdefault(table, set()).add(ends.length - 1 if ends else writer.length)
        if any(len(different) != 1 for different in lengths.values()):
            raise ValueError(f"columns of different lengths: {lengths}")
        tables = {table: equal.pop() for table, equal in lengths.items()}
        files = {}
        for path in sorted(self.directory.glob("*.npy")):
            name = f"{self.directory.name}/{path.name}"
            files[name] = {"bytes": path.stat().st_size, "sha256": list(block_checksums(path))}
        tokens = sum(self.writers[c].length for c in TEXTS if c in self.writers)
        rows = {"rows": tables.pop(""), "tokens": tokens}
        rows |= {} if self.words is None else {"words": self.words}
        return rows | ({"tables": tables} if tables else {}) | {"files": files}


class StoreWriter:
    """Writes the splits of a store. Get one from `create_store`."""

    def __init__(
        self,
        directory: Path,
        tokenizer: tokenizers.Tokenizer,
        columns: dict[str, str],
        ragged: Sequence[str],
    ):
        small = len(tokenizer) <= 2**16
        ids = np.dtype(np.uint16 if small else np.uint32)
        self.directory, self.tokenizer, self.ragged = directory, tokenizer, ragged
        self.columns = {c: ids if c in TEXTS else np.dtype(t) for c, t in columns.items()}
        self.splits: dict[str, dict[str, Any]] = {}
        self.unknown: dict[str, str] = {}  # split -> how much of it is unknown, if it is much
        self.hides_text = False  # whether unknown tokens stand for much of the text of a split

    @contextmanager
    def split(self, name: str) -> Iterator[SplitWriter]:
        """A context that writes a new split. Raises BadInput at its end if the split has no
        rows."""
        unk = self.tokenizer.special["unk"]
        writer = SplitWriter(self.directory / name, self.columns, self.ragged, unk)
        try:
            yield writer
        finally:
            writer.close()
        self.splits[name], self.unknown[name] = writer.describe(), writer.unknown()
        self.hides_text |= writer.hides_text
        if self.splits[name]["rows"] == 0:
            raise BadInput(
                f"the split {name!r} would be empty: its input holds no example; give another input"
            )

    def finish(
        self,
        kind: str,
        labels: Sequence[str],
        metric: str | None,
        origin: dict[str, Any],
        choices: int = 1,
    ) -> None:
        """Write the tokenizer and `store.json`. Call this after all splits are written.

        `origin` holds the command, the sources and the options. `choices` is the number of rows of
        a question, for the kind "choice" only.
        """
        if (choices > 1) != (kind == "choice"):
            raise ValueError(f"a store of kind {kind} cannot have {choices} rows per question")
        if torn := [name for name, split in self.splits.items() if split["rows"] % choices]:
            raise ValueError(f"the split {torn[0]} ends within a question of {choices} rows")
        self.tokenizer.save(self.directory)
        meta = {
            "format": FORMAT,
            "kind": kind,
            "metric": metric,
            "labels": list(labels),
            **({"choices": choices} if kind == "choice" else {}),
            "tokenizer": {
                "kind": self.tokenizer.kind,
                "vocab_size": len(self.tokenizer),
                "fingerprint": self.tokenizer.fingerprint,
            },
            "columns": {
                c: {"dtype": str(t), "ragged": c in self.ragged} for c, t in self.columns.items()
            },
            "splits": self.splits,
            "origin": origin,
        }
        write_json(self.directory / "store.json", meta)
        write_sums(self.directory)
        if parts := [self.unknown[name] for name in self.splits if self.unknown[name]]:
            more = WHOLE_WORDS if self.hides_text else ""
            say(f"{tokenizers.unknown_warning(parts, self.tokenizer)}{more}", error=True)


def write_sums(directory: Path) -> None:
    """Write the checksums of store.json and the tokenizer's files. Call this last."""
    small = [path for path in sorted(directory.iterdir()) if path.is_file()]
    write_json(directory / SUMS, {"sha256": {p.name: file_checksum(p) for p in small}})


@contextmanager
def create_store(
    path: str | Path,
    tokenizer: tokenizers.Tokenizer,
    columns: dict[str, str],
    ragged: Sequence[str] = ("tokens",),
    overwrite: bool = False,
) -> Iterator[StoreWriter]:
    """A context that writes a new store, which appears at `path` only when it is complete.

    `columns` maps each column to its dtype. The dtypes of `tokens` and `tokens_b` are ignored; the
    size of the vocabulary decides them. Raises BadInput if `path` exists; with `overwrite` only if
    it is not a store.
    """
    path = Path(path)
    if overwrite and path.exists() and not (path / "store.json").is_file():
        raise BadInput(f"{path} is not a store, so it is not overwritten; give another output")
    with atomic_directory(path, overwrite) as temporary:
        yield StoreWriter(temporary, tokenizer, columns, ragged)
