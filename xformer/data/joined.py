"""Several stores read as one: the rows of the first, then those of the second, and so on. If
several were made with the same held-out rows, these are read only once.

The user gives a list of stores, or a joined store, which contains only their paths and was written
by `preprocess.py join`.

Columns of ids and other ragged columns stay memory-mapped. Offsets and columns with one value for
each row are joined in memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.display import one_line
from xformer.data.errors import BadInput
from xformer.data.store import JoinsOthers, Ragged, Split, Store, open_store


class Parts:
    """Arrays of one dtype that are read as one array, without copying them. A joined Ragged has
    these as its values."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays, self.dtype = arrays, arrays[0].dtype
        self.bounds = np.cumsum([0, *map(len, arrays)])  # array i begins at bounds[i]

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        if not isinstance(index, slice):
            return self.take(index)
        start, stop, _ = index.indices(len(self))
        pairs = zip(self.arrays, self.bounds.tolist(), strict=False)
        pieces = [a[max(start - begin, 0) : max(stop - begin, 0)] for a, begin in pairs]
        pieces = [piece for piece in pieces if len(piece)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, self.arrays[0][:0]])

    def take(self, places: np.ndarray, mode: str = "clip") -> np.ndarray:
        """The values at `places` (N,), like numpy's `take`. The only mode is clip."""
        assert mode == "clip"
        places = places.clip(0, len(self) - 1)
        owners = self.bounds.searchsorted(places, "right") - 1  # the array of each place
        taken = np.empty(len(places), self.dtype)
        for i, values in enumerate(self.arrays):
            here = np.flatnonzero(owners == i)
            taken[here] = values[places[here] - self.bounds[i]]
        return taken

    def max(self, initial: int) -> int:
        return int(max(values.max(initial=initial) for values in self.arrays))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All values in memory. Metrics need the labels of a whole split."""
        return np.concatenate(self.arrays).astype(dtype or self.dtype)


class Joined(Store):
    """Stores of one kind, read as one. Without a `path`, it takes that of the first store, and its
    name lists all stores."""

    def __init__(self, stores: Sequence[Store], path: Path | None = None):
        first, self.stores = stores[0], stores
        self.path = path or first.path
        self.name = str(path or " and ".join(store.name for store in stores))
        self.kind, self.labels, self.metric = first.kind, first.labels, first.metric
        self.choices = first.choices
        self.fingerprint, self.vocab_size = first.fingerprint, first.vocab_size
        # raw input is parsed as for the first store
        self.meta = {name: first.meta[name] for name in ("origin", "columns")}
        self.key = sha256("\n".join(store.key for store in stores).encode()).hexdigest()
        names = dict.fromkeys(name for store in stores for name in store.splits)
        self._splits = {name: _joined_split(name, self.parts) for name in names}

    @property
    def parts(self) -> list[Store]:
        return [part for store in self.stores for part in store.parts]

    def damage(self) -> str:
        return next(filter(None, (store.damage() for store in self.stores)), "")


def open_stores(paths: str | Path | Sequence[str | Path]) -> Store:
    """Open a store, or several as one (see Joined), without reading their ids.

    Raises BadInput as `open_store` does, and if two stores hold the same rows, or differ in kind,
    labels, metric, number of endings, tokenizer or columns.
    """
    if isinstance(paths, str | Path):
        return _open(Path(paths))
    stores = [_open(Path(path)) for path in paths]
    return stores[0] if len(stores) == 1 else _joined(stores)


def _open(path: Path) -> Store:
    """Open a store, or the parts of a joined store. Raises BadInput if a part is missing or has
    changed."""
    try:
        return open_store(path)
    except JoinsOthers as joined:
        listed = joined.meta["parts"]
    stores = []
    for part in listed:
        # the path itself may be a symbolic link
        places = [Path(os.path.normpath(at / part["path"])) for at in (path, path.resolve())]
        place = next((each for each in places if (each / "store.json").is_file()), None)
        if place is None:
            raise BadInput(
                f"{path} joins {places[0]}, which is not there: move it back, or join again"
            )
        stores.append(open_store(place))
        if stores[-1].key != part["key"]:
            raise BadInput(f"{place} has changed since {path} joined it: restore it, or join again")
    return _joined(stores, path)


def _joined(stores: Sequence[Store], path: Path | None = None) -> Joined:
    """Stores read as one. Raises BadInput if two hold the same rows, or are unlike."""
    parts = [part for store in stores for part in store.parts]
    for i, part in enumerate(parts):
        for other in parts[:i]:
            if part.key == other.key:
                raise BadInput(f"{other.name} and {part.name} hold the same rows; give one of them")
    for store in stores[1:]:
        _refuse_unlike(stores[0], store)
    return Joined(stores, path)


def _refuse_unlike(first: Store, other: Store) -> None:
    """Raise BadInput if two stores cannot be read as one, naming the difference."""
    for what, a, b in (
        ("kind", first.kind, other.kind),
        ("labels", first.labels, other.labels),
        ("metric", first.metric, other.metric),
        ("the number of endings", str(first.choices), str(other.choices)),
        ("tokenizer", first.fingerprint[:12], other.fingerprint[:12]),
        ("columns", _columns(first), _columns(other)),
    ):
        if a != b:
            words = (", ".join(each) if isinstance(each, list) else each for each in (a, b))
            ours, theirs = (one_line(each or "none", 80) for each in words)
            raise BadInput(
                f"{first.name} and {other.name} cannot be read as one: they differ in {what} "
                f"({ours}; {theirs})"
            )


def _columns(store: Store) -> str:
    return ", ".join(
        f"{name} {'ragged ' if column['ragged'] else ''}{column['dtype']}"
        for name, column in sorted(store.meta["columns"].items())
    )


def _joined_split(name: str, parts: Sequence[Store]) -> Split:
    """One split of all stores. Held-out rows that several stores share are read only once."""
    having = [part for part in parts if name in part.splits]
    different = {part.key if name == "train" else part.split_key(name): part for part in having}
    splits = [part.split(name) for part in different.values()]
    if len(splits) == 1:
        return splits[0]
    tables = [split.columns for split in splits]
    columns = {column: _column(column, tables) for column in tables[0]}
    words = [split.words for split in splits if split.words is not None]
    return Split(
        name,
        sum(split.rows for split in splits),
        sum(split.tokens for split in splits),
        columns,
        sum(words) if len(words) == len(splits) else None,
        splits[0].together,
    )


def _column(name: str, tables: Sequence[dict[str, Any]]) -> Any:
    """A column of joined splits; `tables` are the columns of each."""
    columns = [table[name] for table in tables]
    if isinstance(columns[0], Ragged):
        values: Any = Parts([column.values for column in columns])
        begins = values.bounds[:-1]
        moved = [column.offsets[1:] + n for column, n in zip(columns, begins, strict=True)]
        dtype = np.int32 if len(values) < 2**31 else np.int64
        return Ragged(values, np.concatenate([columns[0].offsets[:1], *moved], dtype=dtype))
    if name == "group":  # the numbers of documents, music pieces or questions go on
        counts = [
            len(table["question.id"]) if "question.id" in table else int(table[name].max()) + 1
            for table in tables
        ]
    elif name == "question.context":  # row numbers in the table `context`
        counts = [len(table["context.text"]) for table in tables]
    else:
        return np.concatenate(columns)
    begins = np.cumsum([0, *counts[:-1]])
    moved = [column + n for column, n in zip(columns, begins, strict=True)]
    return np.concatenate(moved).astype(columns[0].dtype)
