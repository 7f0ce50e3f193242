"""Rows with named columns from delimited files, JSON lines and parquet, read as a stream."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from preprocess.bad import BadRows
from preprocess.binarize import read_lines
from xformer.data.errors import BadInput

ENDINGS = (".tsv", ".csv", ".txt", ".jsonl", ".json", ".parquet")
BLOCK = 8192  # rows of a parquet file held at once


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
    """The ending that tells the format, under a .gz or .zst."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


class Table:
    """One file of rows; `columns` are the names in its header, its first object or its schema.

    Raises BadInput where the file has no row or its format is not that of its ending.
    """

    def __init__(self, path: Path, form: Form | None = None):
        self.path, self.form = path, form or Form.of(path)
        self.kind = ending(path)
        if self.kind == ".parquet":
            self.columns = [str(name) for name in self._parquet().schema_arrow.names]
        elif self.kind in (".jsonl", ".json"):
            first = next(self._objects(BadRows(False)), None)
            self.columns = list(first[1]) if first else []
        else:
            row = next(self._delimited(BadRows(False)), (0, []))[1]
            numbers = [str(i) for i in range(1, len(row) + 1)]
            self.columns = [name.strip() for name in row] if self.form.header else numbers
        if not self.columns:
            raise BadInput(f"{path} holds no row")
        if repeated := {name for name in self.columns if self.columns.count(name) > 1}:
            raise BadInput(f"{path}: two columns are called {repeated.pop()!r}")

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
        there = ", ".join(map(repr, self.columns))
        return BadInput(f"{self.path} has no column {name!r}; it has {there}{hint}")

    def rows(self, names: Sequence[str], bad: BadRows) -> Iterator[tuple[int, list[str | None]]]:
        """(line, the values of these columns as strings) of every row; None for a JSON null.

        A row that lacks a column, or is of another width than the header, is a bad one.
        """
        if self.kind == ".parquet":
            yield from self._parquet_rows(names, bad)
        elif self.kind in (".jsonl", ".json"):
            for line, found in self._objects(bad):
                if lacking := [name for name in names if name not in found]:
                    bad(self.path, line, f"there is no {lacking[0]!r}")
                    continue
                values = self._values(line, [found[name] for name in names], bad)
                if values is not None:
                    yield line, values
        else:
            yield from self._delimited_rows([self.columns.index(name) for name in names], bad)

    # ------------------------------------------------------------------------ delimited

    def _delimited_rows(
        self, places: list[int], bad: BadRows
    ) -> Iterator[tuple[int, list[str | None]]]:
        width = len(self.columns) if self.form.header else max(places) + 1
        rows = self._delimited(bad)
        if self.form.header:
            next(rows, None)
        for line, row in rows:
            if len(row) < width or (self.form.header and len(row) > width):
                there = f"{len(row)} column{'s' if len(row) != 1 else ''}"
                bad(self.path, line, f"{there} instead of {width}{self.form.hint}")
            else:
                yield line, [row[place] for place in places]

    def _delimited(self, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
        """(number of the row's last line, its columns); lines without a character are left out."""
        if self.form.quote is None:
            for number, line in read_lines(self.path, bad):
                if line:
                    yield number, line.split(self.form.delimiter)
            return
        csv.field_size_limit(sys.maxsize)
        lines = (line + "\n" for _, line in read_lines(self.path, bad))
        reader = csv.reader(
            lines, delimiter=self.form.delimiter, quotechar=self.form.quote, strict=True
        )
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                bad(self.path, reader.line_num, f"{error}{self.form.hint}")
                continue
            if row is None:
                return
            if row:
                yield reader.line_num, row

    # ------------------------------------------------------------------------ JSON

    def _objects(self, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line, object) of JSON lines; of one JSON array (number of the item, item)."""
        items: Iterator[tuple[int, Any]] = read_lines(self.path, bad)
        number, first = next(items, (1, ""))
        if self.kind == ".json" and first.lstrip().startswith("["):
            text = "\n".join([first, *(line for _, line in items)])
            found = self._parse(number, text, bad)
            items = enumerate(found if isinstance(found, list) else [], 1)
        else:
            lines = [(number, first)]
            items = (
                (line, self._parse(line, text, bad))
                for source in (lines, items)
                for line, text in source
                if text.strip()
            )
        for line, item in items:
            if isinstance(item, dict):
                yield line, item
            elif item is not None:
                bad(self.path, line, "this is no JSON object {...}")

    def _parse(self, line: int, text: str, bad: BadRows) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            bad(self.path, line, f"not valid JSON: {error}")
            return None

    def _values(self, line: int, values: list[Any], bad: BadRows) -> list[str | None] | None:
        """Strings of JSON values; a list of one (as in TAPE's files) stands for its item."""
        made: list[str | None] = []
        for value in values:
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, bool):
                value = int(value)
            if isinstance(value, list | dict):
                bad(self.path, line, f"{str(value)[:40]!r} is neither text nor a number")
                return None
            made.append(None if value is None else str(value))
        return made

    # ------------------------------------------------------------------------ parquet

    def _parquet(self) -> Any:
        try:
            from pyarrow import lib
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise BadInput(f"{self.path}: parquet needs pip install 'xformer[formats]'") from None
        try:
            return ParquetFile(self.path)
        except (lib.ArrowInvalid, OSError) as error:
            raise BadInput(f"{self.path} is not a parquet file: {error}") from None

    def _parquet_rows(
        self, names: Sequence[str], bad: BadRows
    ) -> Iterator[tuple[int, list[str | None]]]:
        line = 0
        for block in self._parquet().iter_batches(BLOCK, columns=list(names)):
            for row in block.to_pylist():
                line += 1
                values = self._values(line, [row[name] for name in names], bad)
                if values is not None:
                    yield line, values
