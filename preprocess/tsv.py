"""Any delimited file with a column of text, perhaps a second one, and a label or a score."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from preprocess.binarize import check_files, read_lines
from preprocess.tasks import CLASS_METRICS, SCORE_METRICS, Row, Task, check_metric, input_files
from xformer.data.errors import BadInput

ENDINGS = (".tsv", ".csv", ".txt")
NAMED = {"tab": "\t", "comma": ",", "semicolon": ";", "space": " ", "\\t": "\t"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task tsv`."""
    add = parser.add_argument
    add("--text", required=True, metavar="COLUMN", help="The column that holds the text: its name "
        "in the first line, or its number from 1 with --no-header.")  # fmt: skip
    add("--text-b", metavar="COLUMN", help="The column of a second text, for tasks on pairs.")
    add("--label", required=True, metavar="COLUMN", help="The column of the label or score. A test "
        "file may lack it.")  # fmt: skip
    add("--kind", choices=("class", "score"), default="class", help="Whether the label column "
        "names a class or holds a number (default: %(default)s).")  # fmt: skip
    add("--labels", metavar="A,B,C", help="The classes in the order of their ids (default: those "
        "of the training file, sorted by name).")  # fmt: skip
    add("--metric", choices=CLASS_METRICS + SCORE_METRICS, help="What evaluation reports and "
        "selection maximises (default: accuracy for classes, spearman for scores).")  # fmt: skip
    add("--delimiter", metavar="CHAR", help="What stands between columns: one character, or tab, "
        "comma, semicolon, space (default: tab for .tsv and .txt, comma for .csv).")  # fmt: skip
    add("--quoting", metavar="CHAR", help="The character that may enclose a column, or none: "
        "quotes are then ordinary characters (default: none with tabs, \" otherwise).")  # fmt: skip
    add("--no-header", action="store_true", help="The first line is an example; columns are "
        "numbers from 1.")  # fmt: skip


@dataclass(frozen=True)
class Format:
    """How the lines of a delimited file fall into columns."""

    delimiter: str
    quote: str | None
    header: bool

    @classmethod
    def of(cls, path: Path, arguments: argparse.Namespace) -> Format:
        delimiter = arguments.delimiter or ("," if path.suffix == ".csv" else "\t")
        delimiter = NAMED.get(delimiter, delimiter)
        if len(delimiter) != 1:
            raise BadInput(f"--delimiter {arguments.delimiter!r} is not one character")
        quote = arguments.quoting or ("none" if delimiter == "\t" else '"')
        if quote != "none" and len(quote) != 1:
            raise BadInput(f"--quoting {arguments.quoting!r} is neither one character nor none")
        return cls(delimiter, None if quote == "none" else quote, not arguments.no_header)


def read_rows(path: Path, form: Format) -> Iterator[tuple[int, list[str]]]:
    """(number of the row's last line, its columns); lines without any character are left out.

    Raises BadInput naming file and line for bytes that are not UTF-8 and for broken quotes.
    """
    if form.quote is None:
        for number, line in read_lines(path):
            if line:
                yield number, line.split(form.delimiter)
        return
    csv.field_size_limit(sys.maxsize)
    lines = (line + "\n" for _, line in read_lines(path))
    reader = csv.reader(lines, delimiter=form.delimiter, quotechar=form.quote, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: {error}; see --quoting") from None


def find_columns(path: Path, form: Format, wanted: list[str]) -> tuple[list[int | None], int]:
    """Where the wanted columns stand (None: absent), and how many columns a row must have."""
    first = next(read_rows(path, form), None)
    if first is None:
        raise BadInput(f"{path} holds no row")
    if form.header:
        header = [name.strip() for name in first[1]]
        return [header.index(name) if name in header else None for name in wanted], len(header)
    places: list[int | None] = []
    for name in wanted:
        if not name.isdecimal() or int(name) < 1:
            raise BadInput(f"with --no-header a column is a number from 1, not {name!r}")
        places.append(int(name) - 1 if int(name) <= len(first[1]) else None)
    return places, max([place + 1 for place in places if place is not None], default=0)


def _missing(path: Path, form: Format, name: str) -> BadInput:
    first = next(read_rows(path, form))[1]
    if not form.header:
        return BadInput(f"{path} has {len(first)} columns, so there is no column {name}")
    near = get_close_matches(name, first, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return BadInput(f"{path} has no column {name!r}; it has {', '.join(map(repr, first))}{hint}")


def read(arguments: argparse.Namespace) -> Task:
    """The task that a delimited file, or a directory with one a split, describes.

    Raises BadInput for a missing column, naming those there are.
    """
    files = input_files(arguments.input, ENDINGS)
    check_files(files.values())
    texts = [arguments.text] + ([arguments.text_b] if arguments.text_b else [])
    places = {}
    for split, path in files.items():
        form = Format.of(path, arguments)
        found, width = find_columns(path, form, [*texts, arguments.label])
        for name, place in zip([*texts, arguments.label], found, strict=True):
            if place is None and not (split == "test" and name == arguments.label):
                raise _missing(path, form, name)
        places[split] = (path, form, found, width)

    def rows() -> Iterator[Row]:
        for split, (path, form, found, width) in places.items():
            yield from _split_rows(split, path, form, found, width)

    labels = arguments.labels.split(",") if arguments.labels else None
    if labels and (len(set(labels)) != len(labels) or arguments.kind == "score"):
        raise BadInput(f"--labels {arguments.labels}: give each class once, for --kind class")
    columns = {"text": arguments.text, "text_b": arguments.text_b, "label": arguments.label}
    return Task(
        rows=rows,
        files=list(files.values()),
        kind=arguments.kind,
        metric=check_metric(arguments.kind, arguments.metric),
        columns=columns,
        labels=labels,
        pairs=len(texts) == 2,
    )


def _split_rows(
    split: str, path: Path, form: Format, places: list[int | None], width: int
) -> Iterator[Row]:
    *texts, label = places
    chosen = [place for place in texts if place is not None]
    rows = read_rows(path, form)
    if form.header:
        next(rows, None)
    for line, row in rows:
        if len(row) < width or (form.header and len(row) > width):
            there = f"{len(row)} column{'s' if len(row) != 1 else ''}"
            raise BadInput(f"{path}:{line}: {there} instead of {width}; see --quoting, --delimiter")
        value = row[label].strip() if label is not None else ""
        yield Row(split, tuple(row[place] for place in chosen), value or None, path, line)
