"""The store: a directory of memory-mapped columns with token ids and labels.

The ids do not include special tokens, which are added when a batch is built.

    STORE/store.json              columns, splits, labels, checksums and the origin of the data
    STORE/sums.json               the checksums of store.json and the tokenizer's files
    STORE/tokenizer_meta.json ... the tokenizer that made the ids
    STORE/train/tokens.npy        the ids of all rows, concatenated (uint16 or uint32)
    STORE/train/tokens.offsets.npy  row i is tokens[offsets[i]:offsets[i + 1]]
    STORE/train/label.npy         a plain column: one value for each row
    STORE/train/labels.npy        a column with its own offsets: one value for each token
    STORE/train/context.text.npy  a column of the table `context`, which has its own rows

Any program can read the columns with `np.load(file, mmap_mode="r")`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import tokenizers
from xformer.data.errors import BadInput, typed
from xformer.data.files import (
    BLOCK,
    checked_blocks,
    file_checksum,
    half_replaced,
    installed,
    load_array,
    near,
    put_back,
    read_json,
    read_sums,
    what_is,
)

FORMAT, JOINED = 1, 2  # JOINED: the store consists of others (see xformer.data.joined)
MAX_PIECES = 2**24  # largest size of a vocabulary
TEXTS = ("tokens", "tokens_b")  # the columns of ids
# the splits that preprocess.py writes, in their order in a store
ORDER = ("train", "valid", "valid_mismatched", "test", "test_mismatched")
# what a file, the column of a table or a program may call a split
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "devel": "valid",
    "test": "test",
}
UNLABELLED, UNSEEN = -1, -2  # label of a row without a class; with a class unseen in training
# Words are separated by white space. The label of a word is that of its first token (Devlin et al.
# 2019, section 5.3), and its other tokens are IGNORED. A word can be UNLABELLED or UNSEEN, too.
IGNORED = -100
LONGEST_ANSWER = 30  # the most tokens of an answer that is predicted (Devlin et al. 2019)
NO_LABEL = "_"  # in labels as text: this word has no label
ENTITY_LABEL = re.compile(r"O|[BIMELSU]-.+")
SUMS = "sums.json"
TRIES = 100  # attempts to open a store that is being replaced
REMEDY = "make the store again, or restore it from a copy"
HEADER = 128  # bytes of a column's .npy header, which has room for any number of rows


@dataclass(frozen=True)
class Ragged:
    """A column whose rows differ in length: row i is values[offsets[i] : offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def __repr__(self) -> str:
        return f"Ragged({len(self):,} rows, {len(self.values):,} values of {self.values.dtype})"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        row = range(len(self))[row]  # as in a list: -1 is the last row
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def text(self, row: int) -> str:
        """A row of UTF-8 bytes as a string."""
        return self[row].tobytes().decode()

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The lengths of these rows (N,), (N,) int64."""
        return (self.offsets[rows + 1] - self.offsets[rows]).astype(np.int64)


@dataclass(frozen=True)
class Split:
    """One named part of a store. `columns` maps a name to a Ragged or to a plain array.

    A column named `table.column` belongs to a table with its own rows, such as passages that many
    rows of the split share. `words` is the number of words (separated by white space) in the raw
    text, or None if they were not counted. `together` is the number of neighbouring rows that make
    up an example: the endings of a multiple-choice question, or 1.
    """

    name: str
    rows: int
    tokens: int
    columns: dict[str, Any]
    words: int | None = None
    together: int = 1

    def __repr__(self) -> str:
        columns = ", ".join(self.columns)
        return (
            f"Split({self.name!r}, {self.rows:,} rows, {self.tokens:,} tokens, columns {columns})"
        )


class Store:
    """An open store.

    `kind` is "text", "class", "score", "span", "tag" or "choice". `labels` are the class names.
    `choices` is the number of endings of a question, each of which is a row; for other kinds it is
    1. `key` identifies the content: stores with equal columns have equal keys.
    """

    def __init__(self, path: Path, meta: dict[str, Any]):
        self.path = path
        self.name = str(path)  # the name in messages
        self.meta = meta
        self.kind: str = meta["kind"]
        self.labels: list[str] = meta["labels"]
        self.metric: str | None = meta["metric"]
        self.choices: int = meta["choices"] if self.kind == "choice" else 1
        if type(self.choices) is not int or (self.kind == "choice" and self.choices < 2):
            raise ValueError(f"choices is {self.choices!r}")
        self.fingerprint: str = meta["tokenizer"]["fingerprint"]
        self.vocab_size: int = meta["tokenizer"]["vocab_size"]
        if type(self.vocab_size) is not int or not 0 < self.vocab_size <= MAX_PIECES:
            raise ValueError(f"vocab_size is {self.vocab_size!r}")
        self.key: str = sha256(repr(sorted(_files(meta))).encode()).hexdigest()
        self._files: dict[str, tuple[int, ...]] = {}  # `_stamp` of each mapped file
        self._splits = {name: self._open(name) for name in meta["splits"]}
        if other := sorted(dict(_files(meta)).keys() ^ self._files.keys()):
            raise ValueError(f"{other[0]} does not belong to any column")

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {split.rows:,}" for name, split in self._splits.items())
        return f"{type(self).__name__}({self.name!r}, kind {self.kind}, rows: {rows})"

    @property
    def parts(self) -> list[Store]:
        """The stores that this one consists of: itself."""
        return [self]

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    def split(self, name: str) -> Split:
        """A split by name. Raises BadInput if the store has no such split, or if it has no rows."""
        if name not in self._splits:
            raise BadInput(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        if self._splits[name].rows == 0:
            raise BadInput(f"{self.name} has no rows in its split {name!r}: make the store again")
        return self._splits[name]

    def split_key(self, name: str) -> str:
        """Identifies the content of a split, as `key` does that of the store."""
        files = self.meta["splits"][name]["files"]
        return repr(sorted((Path(file).name, each["sha256"]) for file, each in files.items()))

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that made the ids."""
        return tokenizers.load_tokenizer(self.path)

    def verify(self) -> Iterator[tuple[str, int, bool]]:
        """Check every 64 MiB block of every column; yields (file, block number, whether good).

        A good block has the recorded checksum and contains only valid values. The iterator ends
        early if the store has been replaced since it was opened.
        """
        for name, sums in _files(self.meta):
            blocks = checked_blocks(self.path / name, self._validity(name))
            for block, expected in enumerate(sums):
                good = False
                with suppress(FileNotFoundError):
                    good = next(blocks, None) == (expected, True)
                if not good and _stamp(self.path / name) != self._files[name]:
                    return
                yield name, block, good

    def _validity(self, name: str) -> Callable[[memoryview], bool]:
        """A function that takes the pieces of a file in order, and says of each whether its values
        are valid: ids in the vocabulary, labels that are classes, offsets that start at 0 and never
        decrease. The file is read and not mapped, because mapped pages would count as memory of the
        run."""
        split, _, file = name.partition("/")
        column, of_offsets = file.removesuffix(".npy"), file.endswith(".offsets.npy")
        values = self._splits[split].columns[column.removesuffix(".offsets")]
        least, most = 0, self.vocab_size
        if column in ("label", "labels") and self.kind in ("class", "tag"):
            least, most = UNSEEN if column == "label" else IGNORED, len(self.labels)
        elif column == "label" and self.kind == "choice":
            least, most = UNLABELLED, self.choices
        elif not of_offsets and column not in TEXTS:
            return lambda piece: True
        if isinstance(values, Ragged):
            values = values.offsets if of_offsets else values.values
        header, last, dtype = HEADER, None, values.dtype

        def valid(piece: memoryview) -> bool:
            nonlocal header, last
            piece, header = piece[header:], max(0, header - len(piece))
            part = np.frombuffer(piece, dtype, len(piece) // dtype.itemsize)
            if not len(part):
                return True
            if not of_offsets:
                return bool(part.min() >= least and part.max() < most)
            begins = part[0] == 0 if last is None else part[0] >= last
            last = part[-1]
            return bool(begins and (part[1:] >= part[:-1]).all())

        return valid

    def damage(self) -> str:
        """A sentence that names the first bad block, or "" if all are good."""
        for name, block, good in self.verify():
            if not good:
                where = f"{self.path / name} is damaged in block {block} of {BLOCK} bytes"
                return f"{where}: {REMEDY}"
        return ""

    def verify_in_background(
        self, report: Callable[[str], None], begin: threading.Event | None = None
    ) -> threading.Thread:
        """Check every block in a daemon thread, and call `report` with the first bad one.

        The thread waits for `begin` and has the lowest priority.
        """

        def check() -> None:
            if begin is not None:
                begin.wait()
            if sys.platform == "linux":  # elsewhere a thread's number is not that of a process
                with suppress(OSError):  # without permission the thread keeps its priority
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            if line := self.damage():
                report(line)

        thread = threading.Thread(target=check, name="verify", daemon=True)
        thread.start()
        return thread

    def _open(self, name: str) -> Split:
        meta = self.meta["splits"][name]
        columns = {column: self._column(name, column, meta) for column in self.meta["columns"]}
        words = meta.get("words")
        if words is not None and (type(words) is not int or words < 0):
            raise ValueError(f"words is {words!r}")
        if meta["rows"] % self.choices:
            raise BadInput(
                f"{self.path / name} holds {meta['rows']} rows, which is not a multiple of the "
                f"{self.choices} endings of a question: make the store again"
            )
        return Split(name, meta["rows"], meta["tokens"], columns, words, self.choices)

    def _column(self, split: str, column: str, meta: dict[str, Any]) -> Ragged | np.ndarray:
        """Map a column of a split whose entry in store.json is `meta`. Raises BadInput if the files
        do not fit store.json."""
        table, dot, _ = column.partition(".")
        rows = meta["tables"][table] if dot else meta["rows"]
        file, expected = f"{split}/{column}", self.meta["columns"][column]
        values = self._map(f"{file}.npy", meta)
        if not values.ndim or str(np.dtype((values.dtype, values.shape[1:]))) != expected["dtype"]:
            raise BadInput(f"{self.path / file}.npy is not of the type in store.json: {REMEDY}")
        if not expected["ragged"]:
            if len(values) == rows:
                return values
            raise BadInput(f"{self.path / file}.npy has {len(values)} rows, not {rows}: {REMEDY}")
        offsets = self._map(f"{file}.offsets.npy", meta)
        one_each = offsets.ndim == 1 and offsets.dtype.kind == "i" and len(offsets) == rows + 1
        if not one_each or offsets[-1] != len(values):
            raise BadInput(f"{self.path / file}.offsets.npy contradicts its values: {REMEDY}")
        return Ragged(values, offsets)

    def _map(self, file: str, meta: dict[str, Any]) -> np.ndarray:
        """Map a file of a split. Raises BadInput if it is missing or has another size."""
        path = self.path / file
        if not path.is_file():
            raise BadInput(f"{path} is missing, so the store is incomplete: {REMEDY}")
        size, expected = path.stat().st_size, meta["files"][file]["bytes"]
        if size != expected:
            raise BadInput(f"{path} has {size} bytes, not {expected}: {REMEDY}")
        self._files[file] = _stamp(path)
        # An empty array cannot be mapped. The result is converted to a plain array, because every
        # look-up in an np.memmap is slower.
        return np.asarray(load_array(path, mapped=size != HEADER))


class JoinsOthers(BadInput):
    """The store consists of others, which are not opened."""

    def __init__(self, path: Path, meta: dict[str, Any]):
        super().__init__(f"{path} joins other stores: open it with xformer.data.joined.open_stores")
        self.meta = meta


def open_store(path: str | Path) -> Store:
    """Open a store without reading its columns.

    Raises JoinsOthers if the store only names others (see `xformer.data.joined.open_stores`).
    Raises BadInput if there is no store, if it has another format version, if a file has the wrong
    size or header, or if store.json or a file of the tokenizer has the wrong checksum. If the store
    is replaced while it is being opened, it is opened again.
    """
    path = Path(path)
    for _ in range(TRIES):
        put_back(path)
        before = _stamp(path / "store.json")
        try:
            store = _open_store(path)
        except (BadInput, FileNotFoundError):
            being_replaced = half_replaced(path)
            if _stamp(path / "store.json") == before and not being_replaced:
                raise
        else:
            if _stamp(path / "store.json") == before:
                return store
    raise BadInput(f"{path} was replaced {TRIES} times while it was opened; wait and try again")


def _open_store(path: Path) -> Store:
    if not (path / "store.json").is_file():
        raise no_store(path)
    _check_sums(path)
    meta = read_json(path / "store.json")
    if isinstance(meta, dict) and meta.get("format") == JOINED:
        raise JoinsOthers(path, meta)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        door = typed("preprocess.py")
        raise BadInput(f"{path} is not a store of format {FORMAT}; make it again with {door}")
    try:
        return Store(path, meta)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{path / 'store.json'} is damaged: {error!r}") from None


def no_store(path: Path) -> BadInput:
    """The error for a path that is not a store. It says what the path is instead."""
    real = installed(path)
    if not real.exists():
        return BadInput(f"{path} is not a store: it does not exist{near(path)}")
    remedy = f"give a directory that {typed('preprocess.py')} made from text or from labelled rows"
    if not (what := what_is(real)):
        return BadInput(f"{path} is not a store (no store.json); {remedy}")
    elsewhere = " (a model is given as init=)" if what in ("a checkpoint", "a run") else ""
    return BadInput(f"{path} is not a store but {what}{elsewhere}; {remedy}")


def _check_sums(path: Path) -> None:
    """Raise BadInput if store.json or a file of the tokenizer differs from its checksum. Stores of
    early versions have no checksums of these files."""
    if not (path / SUMS).exists():
        return
    for name, expected in read_sums(path / SUMS, "store.json").items():
        if not (path / name).is_file():
            raise BadInput(f"{path / name} is missing, although {SUMS} lists it: {REMEDY}")
        if file_checksum(path / name) != expected:
            raise BadInput(f"{path / name} differs from its checksum in {SUMS}: {REMEDY}")


def _stamp(path: Path) -> tuple[int, ...]:
    """Numbers that change if a file is written or replaced; () if there is no file.

    A copy may have the inode and the time of modification of a deleted file, but never its ctime.
    """
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _files(meta: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The files of all splits, with the checksums of their blocks."""
    splits = meta["splits"].values()
    return [(name, file["sha256"]) for split in splits for name, file in split["files"].items()]


def marks_entities(labels: Collection[str]) -> bool:
    """Whether these classes mark entities: B-X begins an entity of type X, I-X (or M-X) continues
    it, O is outside (Ramshaw & Marcus 1995). Optionally, E-X (or L-X) ends an entity, and S-X (or
    U-X) is one of a single word (BIOES, BILOU and BMES)."""
    return all(map(ENTITY_LABEL.fullmatch, labels)) and any(label != "O" for label in labels)
