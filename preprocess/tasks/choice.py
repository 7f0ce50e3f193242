"""Multiple choice: a context and several endings, one of which is right (SWAG, COPA, RACE).

A file has one question a row. All questions have the same number of endings. They stand in columns
of their own, or in one column as a list. In the store each ending is a row: the context in
`tokens`, the ending in `tokens_b`, and the number of the question's right ending in `label`. The
rows of a question follow one another.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence

from xformer.data.errors import BadInput

from ..arguments import whole_number as number
from ..bad import BadRows
from .labelled import Row, Task, input_files
from .tables import ENDINGS, HALF
from .tsv import add_form, open_tables

ABOUT = "Questions with a context and two or more endings, one of which is right."
UNLABELLED = ("valid", "test")  # splits that may lack labels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task choice`."""
    add = parser.add_argument
    add(
        "--context",
        required=True,
        nargs="+",
        metavar="COLUMN",
        help="The column that holds the context: its name in the first line, or its number from 1 "
        "with --no-header. The texts of several columns are joined by a space.",
    )
    add(
        "--endings",
        required=True,
        nargs="+",
        metavar="COLUMN",
        help="Two or more columns with an ending each, or one column that holds a list of all "
        "endings: a list of JSON lines or parquet, or a JSON list as text.",
    )
    add(
        "--label",
        required=True,
        metavar="COLUMN",
        help="The column that says which ending is right: its number, or its letter from A. A "
        "valid or test file may lack the column; there an empty label or -1 means that the answer "
        "is not known.",
    )
    add(
        "--first",
        type=number(0, 1),
        default=0,
        metavar="N",
        help="The number of the first ending in the label column, 0 or 1 (default: %(default)s).",
    )
    add_form(parser)


class Cells:
    """The columns of a question, and what stands in them: those of the context, then those of the
    endings. `choices` is the number of endings; 0 until the first list has been read."""

    def __init__(self, context: Sequence[str], endings: Sequence[str]):
        self.context, self.endings = context, endings
        self.choices = len(endings) if len(endings) > 1 else 0

    @property
    def columns(self) -> list[str]:
        return [*self.context, *self.endings]

    @property
    def lists(self) -> Sequence[str]:
        """The column that holds a list of endings, if one does."""
        return self.endings if len(self.endings) == 1 else ()

    def texts(self, cells: Sequence[str | None]) -> tuple[str, ...]:
        """The context and the endings, from the values of `columns`. Raises ValueError that says
        what is wrong with them."""
        width = len(self.context)
        context = " ".join(text for text in cells[:width] if text and text.strip())
        if self.lists:
            endings = self._list(cells[width] or "")
            names = [f"item {i + 1} of column {self.endings[0]!r}" for i in range(len(endings))]
        else:
            endings = [text or "" for text in cells[width:]]
            names = [f"column {name!r}" for name in self.endings]
        for name, text in zip(names, endings, strict=True):
            if not text.strip():
                raise ValueError(f"{name} is empty; every question needs all its endings")
        return context, *endings

    def _list(self, text: str) -> list[str]:
        """The endings in a JSON list of as many as the first question has."""
        name = self.endings[0]
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list):
            shown = repr(text) if len(text) <= 40 else f"{text[:37]!r}..."
            raise ValueError(
                f"column {name!r} is {shown}, which is not a list; write "
                '["one ending", "another"], or give --endings two or more columns'
            )
        if wrong := [item for item in found if isinstance(item, bool | list | dict | None)]:
            raise ValueError(f"column {name!r} lists {json.dumps(wrong[0])[:40]}, which is no text")
        endings = [str(item) for item in found]
        if any(HALF.search(ending) for ending in endings):
            raise ValueError(f"column {name!r}: half a surrogate pair, which is no character")
        if len(endings) < 2:
            raise ValueError(f"column {name!r} lists {_endings(len(endings))}; give two or more")
        self.choices = self.choices or len(endings)
        if len(endings) != self.choices:
            raise ValueError(
                f"column {name!r} lists {_endings(len(endings))}; the first question has "
                f"{self.choices}, and all questions need the same number"
            )
        return endings


def _endings(count: int) -> str:
    return f"{count} ending{'s' * (count != 1)}"


def ending_of(label: str, first: int, choices: int) -> int:
    """The number of the right ending, counted from 0. `first` is the number of the first ending in
    the file. Raises ValueError that says which labels there can be."""
    if re.fullmatch("[A-Za-z]", label):
        found = ord(label.upper()) - ord("A")
    else:  # a column of numbers with gaps is often written as 0.0, 1.0
        whole = re.fullmatch(r"([0-9]{1,9})(\.0+)?", label)
        found = int(whole[1]) - first if whole else -1
    if 0 <= found < choices:
        return found
    last = first + choices - 1
    letters = f", or a letter from A to {chr(ord('A') + choices - 1)}" if choices <= 26 else ""
    hint = " (from 1 with --first 1)" if first == 0 and found == choices else ""
    raise ValueError(
        f"label {label[:40]!r} names none of the {choices} endings; it must be a number from "
        f"{first} to {last}{letters}{hint}"
    )


def read(arguments: argparse.Namespace) -> Task:
    """The questions of a file, or of a directory with one file a split.

    Raises BadInput for a missing column, naming those there are.
    """
    files = input_files(arguments, ENDINGS)
    columns = Cells(arguments.context, arguments.endings).columns
    if len({*columns, arguments.label}) <= len(columns):
        raise BadInput("--context, --endings and --label must be different columns")
    used = set[str]()
    lists = Cells(arguments.context, arguments.endings).lists
    tables = open_tables(files, columns, arguments, used, UNLABELLED, lists)
    bad = BadRows(arguments.skip_bad)

    def rows() -> Iterator[Row]:
        cells = Cells(arguments.context, arguments.endings)
        for table, labelled, marks in tables:
            wanted = [*columns, arguments.label] if labelled else columns
            for split, line, values in marks.rows(table, wanted, bad):
                label = (values[-1] or "").strip() if labelled else ""
                unknown = not label or (label == "-1" and split in UNLABELLED)
                try:
                    texts = cells.texts(values[: len(columns)])
                    right = None if unknown else ending_of(label, arguments.first, cells.choices)
                except ValueError as error:
                    bad(table.path, line, str(error))
                    continue
                yield Row(split, texts, None if right is None else str(right), table.path, line)

    return Task(
        rows=rows,
        files=[path for paths in files.values() for path in paths],
        kind="choice",
        metric="accuracy",
        columns={"text": arguments.context, "text_b": arguments.endings, "label": arguments.label},
        bad=bad,
        splits=[(split, paths[0]) for split, paths in files.items()],
        pairs=True,
        split_columns=used,
    )
