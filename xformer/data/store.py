"""The store: a directory of memory-mapped columns, one row an example, bare ids only.

    STORE/store.json              what is in it: columns, splits, labels, checksums, where from
    STORE/sums.json               the checksums of store.json and the tokenizer's files
    STORE/tokenizer_meta.json ... the tokenizer that made the ids
    STORE/train/tokens.npy        every row's ids end to end (uint16 where the vocabulary allows)
    STORE/train/tokens.offsets.npy  row i is tokens[offsets[i]:offsets[i + 1]]
    STORE/train/label.npy         a plain column: one value a row
    STORE/train/labels.npy        with offsets of its own: one value a token
    STORE/train/context.text.npy  a column of the table `context`, which has rows of its own

Any program reads it with `np.load(file, mmap_mode="r")`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import tokenizers
from xformer.data.errors import BadInput, Failure, typed
from xformer.data.files import (
    BLOCK,
    block_checksums,
    file_checksum,
    half_replaced,
    load_array,
    put_back,
    read_json,
    read_own_json,
)

FORMAT = 1
PIECES = 2**24  # of the largest vocabulary
TEXTS = ("tokens", "tokens_b")  # the columns of ids
UNLABELLED, UNSEEN = -1, -2  # class labels: there is none; it is none of the training classes
LEAST = -100  # of labels a token: there is no word (xformer.data.tags.IGNORED)
SUMS = "sums.json"
CHECKED = 2**22  # bytes of a column looked at at once
TRIES = 100  # to open a store that is being replaced
HEADER = 128  # bytes of a column's .npy header, in which numpy leaves room for any number of rows


# ---------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Ragged:
    """A column of rows of different lengths: `values` end to end, row i between offsets i, i+1."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def text(self, row: int) -> str:
        """Row of a column of UTF-8 bytes as a string."""
        return self[row].tobytes().decode()

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens in each of the rows, int64."""
        return (self.offsets[rows + 1] - self.offsets[rows]).astype(np.int64)


@dataclass(frozen=True)
class Split:
    """One named part of a store: `columns` maps a name to a Ragged or to a plain array.

    A column named `table.column` belongs to a table beside the rows, with an entry for each of its
    own (a passage that many rows share). `words` is how many words with white space between them
    the raw text has; None where nobody counted them. `together` rows, one after the other, belong
    to one example: the endings of a question."""

    name: str
    rows: int
    tokens: int
    columns: dict[str, Any]
    words: int | None = None
    together: int = 1


class Store:
    """An opened store. `kind` is "text", "class", "score", "span", "tag" or "choice"; `labels` the
    class names; `choices` how many rows, one for each ending, a question has (1 if the kind is not
    "choice")."""

    def __init__(self, path: Path, meta: dict[str, Any]):
        self.path = path
        self.name = str(path)  # what messages call it
        self.meta = meta
        self.kind: str = meta["kind"]
        self.labels: list[str] = meta["labels"]
        self.metric: str | None = meta["metric"]
        self.choices: int = meta["choices"] if self.kind == "choice" else 1
        if type(self.choices) is not int or (self.kind == "choice" and self.choices < 2):
            raise ValueError(f"choices is {self.choices!r}")
        self.fingerprint: str = meta["tokenizer"]["fingerprint"]
        self.vocab_size: int = meta["tokenizer"]["vocab_size"]
        if type(self.vocab_size) is not int or not 0 < self.vocab_size <= PIECES:
            raise ValueError(f"vocab_size is {self.vocab_size!r}")
        self.key: str = sha256(repr(sorted(_files(meta))).encode()).hexdigest()
        self._files: dict[str, tuple[int, ...]] = {}  # which file was mapped
        self._splits = {name: self._open(name) for name in meta["splits"]}
        if other := sorted(dict(_files(meta)).keys() ^ self._files.keys()):
            raise ValueError(f"{other[0]} is the file of no column")

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    def split(self, name: str) -> Split:
        """A split by name. Raises BadInput naming those that exist, or if it has no row."""
        if name not in self._splits:
            raise BadInput(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        if self._splits[name].rows == 0:
            raise BadInput(f"{self.name} has no row in its split {name!r}: make the store again")
        return self._splits[name]

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer the ids were made with."""
        return tokenizers.load_tokenizer(self.path)

    def verify(self) -> Iterator[tuple[str, int, bool]]:
        """(file, block number, good?) for every 64 MiB block of every column, one by one: its
        checksum, and whether what is in it can be. Ends early where the store was replaced."""
        for name, sums in _files(self.meta):
            found, possible = block_checksums(self.path / name), self._possible(name)
            for block, expected in enumerate(sums):
                try:
                    good = next(found, None) == expected
                    good &= next(possible, True)
                except FileNotFoundError:
                    good = False
                if not good and _which(self.path / name) != self._files[name]:
                    return
                yield name, block, good

    def _possible(self, name: str) -> Iterator[bool]:
        """For each block of a file, whether its ids lie in the vocabulary, its classes among those
        there are, its offsets ascend. Read, not mapped: mapped pages count as the run's memory."""
        split, _, file = name.partition("/")
        column, offsets = file.removesuffix(".npy"), file.endswith(".offsets.npy")
        found = self._splits[split].columns[column.removesuffix(".offsets")]
        least, most = 0, self.vocab_size
        if column in ("label", "labels") and self.kind in ("class", "tag"):
            least, most = UNSEEN if column == "label" else LEAST, len(self.labels)
        elif column == "label" and self.kind == "choice":
            least, most = UNLABELLED, self.choices
        elif not offsets and column not in TEXTS:
            return
        values = found
        if isinstance(found, Ragged):
            values = found.offsets if offsets else found.values
        last, end = 0, HEADER + values.nbytes
        with (self.path / name).open("rb") as column_file:
            for block in range(0, end, BLOCK):
                good, block_end = True, min(block + BLOCK, end)
                for start in range(block, block_end, CHECKED):
                    begin, stop = max(start, HEADER), min(start + CHECKED, block_end)
                    column_file.seek(begin)
                    part = np.fromfile(column_file, values.dtype, (stop - begin) // values.itemsize)
                    if not len(part):
                        continue
                    if not offsets:
                        good &= bool(part.min() >= least and part.max() < most)
                        continue
                    good &= bool(part[0] >= last and (np.diff(part) >= 0).all())
                    good &= start > 0 or bool(part[0] == 0)
                    last = part[-1]
                yield good

    def damage(self) -> str:
        """A sentence that names the first bad block; empty if all are good."""
        for name, block, good in self.verify():
            if not good:
                return f"{self.path / name} is damaged in block {block} of {BLOCK} bytes"
        return ""

    def verify_in_background(
        self, report: Callable[[str], None], begin: threading.Event | None = None
    ) -> threading.Thread:
        """Check every block in a daemon thread, which takes only processor time that nobody else
        wants; call `report` once with the first bad one. It waits for `begin`."""

        def check() -> None:
            if begin is not None:
                begin.wait()
            with suppress(OSError):  # it then runs with the priority of all other threads
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            if line := self.damage():
                report(line)

        thread = threading.Thread(target=check, name="verify", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Where work with the rows crashes and the store is damaged, a BadInput that says so."""
        try:
            yield
        except (BadInput, Failure, OSError):
            raise
        except Exception as error:
            if line := self.damage():
                raise BadInput(line) from error
            raise

    def _open(self, name: str) -> Split:
        meta = self.meta["splits"][name]
        columns: dict[str, Any] = {}
        for column in self.meta["columns"]:
            table = column.partition(".")[0] if "." in column else None
            rows = meta["tables"][table] if table else meta["rows"]
            values = self._map(f"{name}/{column}.npy", meta)
            known = self.meta["columns"][column]
            if (
                values.ndim == 0
                or str(np.dtype((values.dtype, values.shape[1:]))) != known["dtype"]
            ):
                raise BadInput(f"{self.path / name}/{column}.npy is not of the type in store.json")
            if known["ragged"]:
                offsets = self._map(f"{name}/{column}.offsets.npy", meta)
                if (
                    offsets.ndim != 1
                    or offsets.dtype.kind != "i"
                    or len(offsets) != rows + 1
                    or offsets[-1] != len(values)
                ):
                    raise BadInput(
                        f"{self.path / name}/{column}.offsets.npy contradicts its values"
                    )
                columns[column] = Ragged(values, offsets)
            else:
                columns[column] = values
            if len(columns[column]) != rows:
                raise BadInput(f"{self.path / name}/{column}.npy has not {rows} rows")
        words = meta.get("words")
        if words is not None and (type(words) is not int or words < 0):
            raise ValueError(f"words is {words!r}")
        if meta["rows"] % self.choices:
            raise BadInput(
                f"{self.path / name} holds {meta['rows']} rows, which are no whole number of "
                f"questions with {self.choices} endings: make the store again"
            )
        return Split(name, meta["rows"], meta["tokens"], columns, words, self.choices)

    def _map(self, file: str, meta: dict[str, Any]) -> np.ndarray:
        path = self.path / file
        if not path.is_file():
            raise BadInput(f"{path} is missing: the store is incomplete")
        size, expected = path.stat().st_size, meta["files"][file]["bytes"]
        if size != expected:
            raise BadInput(f"{path} is {size} bytes, not {expected}: the store is damaged")
        self._files[file] = _which(path)
        # no values: an empty file cannot be mapped. A plain view, as numpy's own class of maps
        # makes every look-up slower
        return np.asarray(load_array(path, mapped=size != HEADER))


def open_store(path: str | Path) -> Store:
    """Open a store without reading its columns.

    Raises BadInput if it is absent, of another format version, or a file's size, header or (of the
    small ones) checksum is off. One that is replaced meanwhile is opened anew.
    """
    path = Path(path)
    for _ in range(TRIES):
        put_back(path)
        before = _which(path / "store.json")
        try:
            store = _open_store(path)
        except (BadInput, FileNotFoundError):
            going_on = half_replaced(path)
            if _which(path / "store.json") == before and not going_on:
                raise
        else:
            if _which(path / "store.json") == before:
                return store
    raise BadInput(f"{path} is replaced again and again while it is opened")


def _open_store(path: Path) -> Store:
    if not (path / "store.json").is_file():
        door = typed("preprocess.py")
        raise BadInput(f"{path} is not a store (no store.json); make one with {door}")
    _check_sums(path)
    meta = read_json(path / "store.json")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        door = typed("preprocess.py")
        raise BadInput(f"{path} is not a store of format {FORMAT}; make it anew with {door}")
    try:
        return Store(path, meta)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{path / 'store.json'} is damaged: {error!r}") from None


def _check_sums(path: Path) -> None:
    """Raise BadInput naming a small file that is not as it was written; stores of before they were
    kept have no checksums."""
    if not (path / SUMS).exists():
        return
    sums = read_own_json(path / SUMS)
    if (
        not isinstance(sums, dict)
        or not isinstance(sums.get("sha256"), dict)
        or "store.json" not in sums["sha256"]
    ):
        raise BadInput(f"{path / SUMS} is damaged: it lists no checksums")
    for name, expected in sums["sha256"].items():
        if not (path / name).is_file():
            raise BadInput(f"{path / name} is missing, which {SUMS} lists: the store is damaged")
        if file_checksum(path / name) != expected:
            raise BadInput(f"{path / name} is damaged: its checksum is not that of {SUMS}")


def _which(path: Path) -> tuple[int, ...]:
    """What tells a file from another of the same name."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _files(meta: dict[str, Any]) -> list[tuple[str, list[str]]]:
    splits = meta["splits"].values()
    return [(name, file["sha256"]) for split in splits for name, file in split["files"].items()]
