"""Rows with named columns from delimited files, JSON lines and parquet, read as a stream."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from xformer.data.errors import BadInput, lacks

from ..bad import BadRows
from ..binarize import PACKED, read_lines

ENDINGS = (".tsv", ".csv", ".txt", ".jsonl", ".json", ".parquet")
BLOCK = 8192  # rows of a parquet file held at once
CELL = 2**24  # characters in a quoted column at most: a quote left open must not swallow a file
BROKEN = object()  # what a text that is not JSON is read as
HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Form:
    """How the lines of a delimited file fall into columns. Without a `header` columns are called
    "1", "2" and so on. `hint` says what the user may change where a line does not fit."""

    delimiter: str
    quote: str | None
    header: bool = True
    hint: str = ""

    @classmethod
    def of(cls, path: Path) -> Form:
        """Commas and quotes for .csv, tabs and no quotes otherwise (GLUE's rule)."""
        return cls(",", '"') if ending(path) == ".csv" else cls("\t", None)


def ending(path: Path) -> str:
    """The ending that tells the format, in small letters, under a .gz or .zst."""
    return (Path(path.stem) if path.suffix in PACKED else path).suffix.lower()


def stem(path: Path) -> str:
    """The file's name without its ending, nor that of its packing."""
    return Path(path.stem).stem if path.suffix in PACKED else path.stem


class Table:
    """One file of rows; `columns` are the names in its header, its first object or its schema.
    A list in one of the columns `lists` of JSON or parquet is given as JSON.

    Raises BadInput where the file has no row or its format is not that of its ending.
    """

    def __init__(self, path: Path, form: Form | None = None, lists: Sequence[str] = ()):
        self.path, self.form, self.lists = path, form or Form.of(path), lists
        self.kind = ending(path)
        # a bad row above the first good one is for `rows` to judge; a bad header ends the work
        bad = BadRows(self.kind in (".jsonl", ".json") or not self.form.header)
        if self.kind == ".parquet":
            self.columns = [str(name) for name in self._parquet().schema_arrow.names]
        elif self.kind in (".jsonl", ".json"):
            self.columns = list(next(self._objects(bad), (0, {}))[1])
        else:
            row = next(self.delimited(bad), (0, []))[1]
            numbers = [str(i) for i in range(1, len(row) + 1)]
            self.columns = [name.strip() for name in row] if self.form.header else numbers
        if not self.columns:
            raise BadInput(bad.first[0] if bad.first else f"{path} holds no row")
        times = Counter(name for name in self.columns if name)
        if repeated := sorted(name for name, count in times.items() if count > 1):
            raise BadInput(f"{path}: two columns are called {repeated[0]!r}")

    def find(self, names: Sequence[str]) -> str | None:
        """The first of these names that is a column."""
        return next((name for name in names if name in self.columns), None)

    def missing(self, name: str) -> BadInput:
        """The error that says what columns there are."""
        if not self.form.header and self.kind not in (".jsonl", ".json", ".parquet"):
            if not name.isdecimal():
                return BadInput(f"with --no-header a column is a number from 1, not {name!r}")
            return BadInput(f"{self.path} has {len(self.columns)} columns; there is no {name}")
        near = get_close_matches(name, self.columns, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return BadInput(f"{self.path} has no column {name!r}; it has {self.shown()}{hint}")

    def shown(self) -> str:
        """The columns for a message; a file without a header may have texts for names."""
        names = [repr(n if len(n) <= 40 else f"{n[:37]}...") for n in self.columns[:20]]
        return ", ".join(names) + (", ..." if len(self.columns) > 20 else "")

    def rows(
        self, names: Sequence[str], bad: BadRows, optional: Sequence[str] = ()
    ) -> Iterator[tuple[int, list[str | None]]]:
        """(line, the values of these columns as strings) of every row; None for a JSON null, and
        for an `optional` column that an object of JSON lacks.

        A row that lacks another column, or is of another width than the header, is a bad one.
        """
        if self.kind == ".parquet":
            yield from self._parquet_rows(names, bad)
        elif self.kind in (".jsonl", ".json"):
            for line, found in self._objects(bad):
                if lacking := [n for n in names if n not in found and n not in optional]:
                    bad(self.path, line, f"there is no {lacking[0]!r}")
                    continue
                values = self._values(line, [(name, found.get(name)) for name in names], bad)
                if values is not None:
                    yield line, values
        else:
            yield from self._delimited_rows([self.columns.index(name) for name in names], bad)

    # ------------------------------------------------------------------------ delimited

    def _delimited_rows(
        self, places: list[int], bad: BadRows
    ) -> Iterator[tuple[int, list[str | None]]]:
        width = len(self.columns) if self.form.header else max(places) + 1
        rows = self.delimited(bad)
        if self.form.header:
            next(rows, None)
        for line, row in rows:
            if len(row) < width or (self.form.header and len(row) > width):
                there = f"{len(row)} column{'s' if len(row) != 1 else ''}"
                bad(self.path, line, f"{there} instead of {width}{self.form.hint}")
            else:
                yield line, [row[place] for place in places]

    def delimited(self, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
        """(number of the row's last line, its columns); lines without a character are left out."""
        if self.form.quote is None:
            for number, line in read_lines(self.path, bad):
                if line:
                    yield number, line.split(self.form.delimiter)
            return
        csv.field_size_limit(CELL)
        number = 0

        def lines() -> Iterator[str]:
            nonlocal number
            for number, line in read_lines(self.path, bad):  # noqa: B007 - told below
                yield line + "\n"

        reader = csv.reader(
            lines(), delimiter=self.form.delimiter, quotechar=self.form.quote, strict=True
        )
        while True:
            start = number + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                where = f" (the row begins in line {start})" if start < number else ""
                bad(self.path, number, f"{error}{where}{self.form.hint}")
                continue
            if row is None:
                return
            if row:
                yield number, row

    # ------------------------------------------------------------------------ JSON

    def _objects(self, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line, object) of JSON lines; of a .json file that is one value (number of the row, row),
        and the file is held in memory."""
        lines = read_lines(self.path, bad)
        items: Iterator[tuple[int, Any]]
        if self.kind == ".json":
            first = next(((number, t) for number, t in lines if t.strip()), (1, ""))
            if _is_whole(first[1]):
                text = "\n".join([first[1], *(line for _, line in lines)])
                items = enumerate(_rows_of(self._parse(1, text, bad)), 1)
            else:
                items = ((n, self._parse(n, t, bad)) for n, t in chain([first], lines) if t.strip())
        else:
            items = ((number, self._parse(number, t, bad)) for number, t in lines if t.strip())
        for line, item in items:
            if isinstance(item, dict):
                yield line, item
            elif item is not BROKEN:
                bad(self.path, line, "this is no JSON object {...}")

    def _parse(self, line: int, text: str, bad: BadRows) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            bad(self.path, line, f"not valid JSON: {error}")
            return BROKEN

    def _values(
        self, line: int, cells: Sequence[tuple[str, Any]], bad: BadRows
    ) -> list[str | None] | None:
        """Strings of the JSON values of columns; a list of one (as in TAPE's files) stands for its
        item."""
        made: list[str | None] = []
        for name, value in cells:
            if isinstance(value, list) and name in self.lists:
                value = json.dumps(value, default=lambda _: None)
            elif isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, bool):
                value = int(value)
            if isinstance(value, list | dict | bytes):
                bad(self.path, line, f"{str(value)[:40]!r} is neither text nor a number")
                return None
            text = None if value is None else str(value)
            if text is not None and not text.isascii() and HALF.search(text):
                bad(self.path, line, "half a surrogate pair, which is no character")
                return None
            made.append(text)
        return made

    # ------------------------------------------------------------------------ parquet

    def _parquet(self) -> Any:
        try:
            from pyarrow import lib
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise lacks(f"{self.path}: parquet", "pyarrow", "formats") from None
        try:
            return ParquetFile(self.path)
        except (lib.ArrowException, OSError, UnicodeError) as error:
            reason = " ".join(str(error).split())
            raise BadInput(f"{self.path} is not a parquet file: {reason}") from None

    def _parquet_rows(
        self, names: Sequence[str], bad: BadRows
    ) -> Iterator[tuple[int, list[str | None]]]:
        line = 0
        for block in self._blocks(names):
            for row in _python(block):
                line += 1
                if row is None:
                    bad(self.path, line, "not valid UTF-8")
                    continue
                values = self._values(line, [(name, row[name]) for name in names], bad)
                if values is not None:
                    yield line, values

    def _blocks(self, names: Sequence[str]) -> Iterator[Any]:
        from pyarrow import lib

        try:
            yield from self._parquet().iter_batches(BLOCK, columns=list(names))
        except (lib.ArrowException, OSError) as error:
            raise BadInput(f"{self.path} is damaged: {' '.join(str(error).split())}") from None


def _python(block: Any) -> list[dict[str, Any] | None]:
    """The rows of a block of a parquet file; None for one with text that is not UTF-8."""
    try:
        return list(block.to_pylist())
    except UnicodeDecodeError:
        if len(block) == 1:
            return [None]
    return [row for i in range(len(block)) for row in _python(block.slice(i, 1))]


def _is_whole(line: str) -> bool:
    """Whether a file that begins with this line is one JSON value, not one a line."""
    if line.lstrip().startswith("["):
        return True
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return line.lstrip().startswith("{") and not line.rstrip().endswith("}")
    return not isinstance(first, dict) or _is_columns(first)


def _is_columns(value: Any) -> bool:
    """Whether this is {"column": {"row": value, ...}, ...}, as pandas writes a table."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(column, dict) for column in value.values())


def _rows_of(value: Any) -> list[Any]:
    """The rows of a list of objects, or of an object of columns."""
    if _is_columns(value):
        keys = dict.fromkeys(key for column in value.values() for key in column)
        return [{name: c[key] for name, c in value.items() if key in c} for key in keys]
    if value is BROKEN:
        return []
    return value if isinstance(value, list) else [value]
