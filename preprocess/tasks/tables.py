"""Rows with named columns from delimited files, JSON lines and parquet, read as a stream."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from unicodedata import normalize

from xformer.data.display import many, say
from xformer.data.errors import BadInput, lacks
from xformer.data.tokenizers import HALF

from ..bad import STRICT, BadRows
from ..binarize import read_lines, unpacked_name

ENDINGS = (".tsv", ".csv", ".txt", ".jsonl", ".json", ".parquet")
BLOCK = 8192  # rows of a parquet file held at once
CELL = 2**24  # the most characters in a quoted cell: an open quote must not swallow a whole file
BROKEN = object()  # stands for a text that is not valid JSON
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon"}
# csv's messages about a quote that nothing closes, so that any number of rows is lost
OPEN_QUOTE = ("unexpected end of data", "field larger than field limit")


@dataclass(frozen=True)
class Form:
    """How the lines of a delimited file are split into columns.

    Without a `header` the columns are called "1", "2" and so on. `hint` is added to the message
    about a line that does not fit. With `guessed` nobody chose `quote`.
    """

    delimiter: str
    quote: str | None
    header: bool = True
    hint: str = ""
    guessed: bool = False

    @classmethod
    def of(cls, path: Path) -> Form:
        """The usual form for a file's name: commas and quotes for .csv, else tabs and no quotes (as
        in GLUE)."""
        return cls(",", '"') if extension(path) == ".csv" else cls("\t", None, guessed=True)


def _from_csv(cell: str) -> bool:
    """Whether a cell is one that csv writes for a text with quotes in it, such as "a ""b"" c"."""
    inner = cell[1:-1]
    return cell[:1] == cell[-1:] == '"' and '""' in inner and '"' not in inner.replace('""', "")


def extension(path: Path) -> str:
    """The ending that tells the format, in lower case: ".csv" for `A.CSV.gz`. That of `A.ndjson` is
    ".jsonl"."""
    ending = unpacked_name(path).suffix.lower()
    return ".jsonl" if ending == ".ndjson" else ending


def stem(path: Path) -> str:
    """The file's name without its ending and that of its compression: "A" for `A.csv.gz`."""
    return unpacked_name(path).stem


def other_separator(form: Form, header: str, name: str) -> str:
    """A hint for a missing column: if another separator gives a header with a column like `name`,
    it names that separator and the remedy; otherwise it is empty."""
    for separator, called in SEPARATORS.items():
        cells = [cell.strip().strip('"') for cell in header.split(separator)]
        known = len(cells) > 1 and get_close_matches(name, cells, 1)
        if separator == form.delimiter or not known:
            continue
        remedy = "separate them by commas, in a file named .csv"
        if form.hint:  # the command has the option
            remedy = f"give --delimiter {called}"
        elif separator != ";":
            remedy = f"rename the file to end in .{'csv' if separator == ',' else 'tsv'}"
        return f"; its columns look {called}-separated: {remedy}"
    return ""


class RowTable:
    """A file of rows. `columns` are the names in its header, its first JSON object or its schema.

    `lists` names columns of JSON or parquet that may hold lists. Their values are given as JSON
    text. Raises BadInput if the file has no row, or is not in the format that its ending names.
    """

    def __init__(self, path: Path, form: Form | None = None, lists: Sequence[str] = ()):
        self.path, self.form, self.lists = path, form or Form.of(path), lists
        self.kind = extension(path)
        self.noted = False  # whether the user knows of cells in quotes
        # a bad header is an error here; a bad first row is reported later, by `rows`
        bad = BadRows(skip=self.kind in (".jsonl", ".json") or not self.form.header)
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
        """The first of `names` that is a column; None if none is."""
        return next((name for name in names if name in self.columns), None)

    def missing(self, name: str) -> BadInput:
        """The error to raise if there is no column `name`. It lists the columns that exist."""
        if not self.form.header and self.kind not in (".jsonl", ".json", ".parquet"):
            if not name.isdecimal():
                return BadInput(f"with --no-header a column is a number from 1, not {name!r}")
            width = len(self.columns)
            return BadInput(f"{self.path} has {width} columns; there is no column {name}")
        near = get_close_matches(name, self.columns, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if near and normalize("NFC", near[0]) == normalize("NFC", name):
            hint = "; it looks the same, but its accents are separate characters in one of the two"
        if self.kind not in (".jsonl", ".json", ".parquet"):
            hint = other_separator(self.form, self.form.delimiter.join(self.columns), name) or hint
        return BadInput(f"{self.path} has no column {name!r}; it has {self.shown()}{hint}")

    def shown(self) -> str:
        """The columns for a message, shortened: without a header they may be whole texts."""
        names = [repr(n if len(n) <= 40 else f"{n[:37]}...") for n in self.columns[:20]]
        return ", ".join(names) + (", ..." if len(self.columns) > 20 else "")

    def rows(
        self,
        names: Sequence[str],
        bad: BadRows,
        optional: Sequence[str] = (),
        advance: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[int, list[str | None]]]:
        """Yield (line, values of the columns `names` as strings) for every row.

        A value is None for a JSON null, and for an `optional` column that a JSON object lacks. A
        row goes to `bad` if it lacks another column, or has more or fewer columns than the header.
        Without a header, and with another separator than a tab, it must not have more columns than
        the first line: a text may have been cut.

        `advance` is called with the size of each block read from the disk. If the file is parquet
        or one JSON value, it is called for each row instead, with an equal share of the file.
        """
        if self.kind == ".parquet":
            yield from self._parquet_rows(names, bad, advance)
        elif self.kind in (".jsonl", ".json"):
            yield from self._json_rows(names, bad, optional, advance)
        else:
            places = [self.columns.index(name) for name in names]
            yield from self._delimited_rows(places, bad, advance)

    def _evenly(
        self, rows: Iterable[Any], count: int, advance: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (number from 1, row) of the `count` rows of the file; see `rows` for `advance`."""
        size = self.path.stat().st_size
        for number, row in enumerate(rows, 1):
            advance(size * number // count - size * (number - 1) // count)
            yield number, row

    # ------------------------------------------------------------------------ delimited

    def _delimited_rows(
        self, places: list[int], bad: BadRows, advance: Callable[[int], None]
    ) -> Iterator[tuple[int, list[str | None]]]:
        width, header = len(self.columns), self.form.header
        least = width if header else max(places) + 1
        more = not header and self.form.delimiter == "\t"  # further columns are ignored
        rows = self.delimited(bad, advance)
        if header:
            next(rows, None)
        for line, row in rows:
            if len(row) < least or (len(row) > width and not more):
                count, expected = many(len(row), "column"), least if len(row) < least else width
                bad(self.path, line, f"{count} instead of {expected}{self.form.hint}")
            else:
                yield line, [row[place] for place in places]

    def delimited(
        self, bad: BadRows, advance: Callable[[int], None] = lambda _: None, empty: bool = False
    ) -> Iterator[tuple[int, list[str]]]:
        """(number of the row's last line, its columns) of every row, a header included. Empty lines
        are skipped, unless `empty` asks for them and the file has no quotes."""
        if self.form.quote is not None:
            yield from self._quoted(self.form.quote, bad, advance)
            return
        quoted = 0  # the first line with a cell that csv must have written
        for number, line in read_lines(self.path, bad, advance):
            if line or empty:
                row = line.split(self.form.delimiter)
                if not quoted and '""' in line and any(map(_from_csv, row)):
                    quoted = number
                yield number, row
        if quoted and self.form.guessed and not self.noted:
            self.noted = True
            remedy = "give --quoting '\"'" if self.form.hint else "write the file as .csv"
            say(
                f"note: {self.path}: cells in quotes are read with their quotes (from line "
                f"{quoted}); if a program for csv wrote them, {remedy}",
                error=True,
            )

    def _quoted(
        self, quote: str, bad: BadRows, advance: Callable[[int], None]
    ) -> Iterator[tuple[int, list[str]]]:
        """`delimited` for files with quotes, in which a row may span several lines."""
        csv.field_size_limit(CELL)
        number = 0  # of the line read last; csv's own count is wrong once a bad line is skipped

        def lines() -> Iterator[str]:
            nonlocal number
            for number, line in read_lines(self.path, bad, advance):  # noqa: B007 - read outside
                yield line + "\n"

        reader = csv.reader(lines(), delimiter=self.form.delimiter, quotechar=quote, strict=True)
        while True:
            start = number + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                where = f" (the row begins in line {start})" if start < number else ""
                reason = str(error)
                if reason.startswith("new-line character"):
                    reason = "a carriage return stands alone; end the lines in LF or CRLF"
                tell = STRICT if reason.startswith(OPEN_QUOTE) else bad
                tell(self.path, number, f"{reason}{where}{self.form.hint}")
                continue
            if row is None:
                return
            if row:
                yield number, row

    # ------------------------------------------------------------------------ JSON

    def _json_rows(
        self,
        names: Sequence[str],
        bad: BadRows,
        optional: Sequence[str],
        advance: Callable[[int], None],
    ) -> Iterator[tuple[int, list[str | None]]]:
        for line, item in self._objects(bad, advance):
            if lacking := [name for name in names if name not in item and name not in optional]:
                bad(self.path, line, f"there is no {lacking[0]!r} in this row")
                continue
            values = self._values(line, [(name, item.get(name)) for name in names], bad)
            if values is not None:
                yield line, values

    def _objects(
        self, bad: BadRows, advance: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (line, object) for every object of a file of JSON lines. A value within another
        object can also be named by its path, such as `document.text`.

        A .json file may instead hold one JSON value, which is read whole. Its rows are then counted
        from 1 in place of lines.
        """
        first = ""
        if self.kind == ".json":
            first = next((text for _, text in read_lines(self.path, bad) if text.strip()), "")
        items: Iterator[tuple[int, Any]]
        if self.kind == ".json" and _is_whole(first):
            text = "\n".join(text for _, text in read_lines(self.path, bad))
            rows = _rows_of(self._parse(1, text, bad))
            items = self._evenly(rows, len(rows), advance)
        else:
            lines = read_lines(self.path, bad, advance)
            items = ((line, self._parse(line, text, bad)) for line, text in lines if text.strip())
        for line, item in items:
            if isinstance(item, dict):
                yield line, {**_paths(item), **item} if _is_nested(item) else item
            elif item is not BROKEN:
                bad(self.path, line, "this is not a JSON object {...}")

    def _parse(self, line: int, text: str, bad: BadRows) -> Any:
        """The value of a JSON text. BROKEN if it is not valid; it then goes to `bad`."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            bad(self.path, line, f"not valid JSON: {error}")
            return BROKEN

    def _values(
        self, line: int, cells: Sequence[tuple[str, Any]], bad: BadRows
    ) -> list[str | None] | None:
        """The values of `cells` (column, JSON value) as strings; None if one of them is bad.

        A list of one item, as in TAPE's files, stands for the item.
        """
        texts: list[str | None] = []
        for name, value in cells:
            if isinstance(value, list) and name in self.lists:
                value = json.dumps(value, default=lambda _: None)
            elif isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, bool):
                value = int(value)
            if isinstance(value, list | dict | bytes):
                bad(
                    self.path,
                    line,
                    f"column {name!r} is {str(value)[:40]!r}, which is neither text nor a number",
                )
                return None
            # a number that is not equal to itself is NaN, which pandas writes for a missing value
            text = None if value is None or value != value else str(value)
            if text is not None and not text.isascii() and HALF.search(text):
                bad(self.path, line, f"column {name!r} holds half of a surrogate pair")
                return None
            texts.append(text)
        return texts

    # ------------------------------------------------------------------------ parquet

    def _parquet(self) -> Any:
        """The open file. Raises BadInput if it is not parquet, or pyarrow is not installed."""
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
        self, names: Sequence[str], bad: BadRows, advance: Callable[[int], None]
    ) -> Iterator[tuple[int, list[str | None]]]:
        count = self._parquet().metadata.num_rows
        rows = (row for block in self._blocks(names) for row in _python(block))
        for line, row in self._evenly(rows, count, advance):
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
    """The rows of a block of a parquet file; None for a row whose text is not UTF-8."""
    try:
        return list(block.to_pylist())
    except UnicodeDecodeError:
        if len(block) == 1:
            return [None]
    return [row for i in range(len(block)) for row in _python(block.slice(i, 1))]


def _is_nested(item: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in item.values())


def _paths(item: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values within a JSON object that are not objects, by their paths: {"a.b": 1}."""
    paths: dict[str, Any] = {}
    for name, value in item.items():
        own = (
            _paths(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
        paths |= own
    return paths


def _is_whole(line: str) -> bool:
    """Whether a file that begins with this line is one JSON value, rather than one per line."""
    if line.lstrip().startswith("["):
        return True
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return line.lstrip().startswith("{") and not line.rstrip().endswith("}")
    return not isinstance(first, dict) or _is_columns(first)


def _is_columns(value: Any) -> bool:
    """Whether a value is {"column": {"row": value, ...}, ...}, as pandas writes a table."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(column, dict) for column in value.values())


def _rows_of(value: Any) -> list[Any]:
    """The rows in a JSON value: a list of objects, an object of columns, or a single object."""
    if _is_columns(value):
        keys = dict.fromkeys(key for column in value.values() for key in column)
        return [{name: c[key] for name, c in value.items() if key in c} for key in keys]
    if value is BROKEN:
        return []
    return value if isinstance(value, list) else [value]
