"""Multiple choice: a context and several endings, one of which is right (SWAG, COPA, RACE).

A file has one question per row, and all questions have the same number of endings. The endings have
a column each, or one column holds a list of them. In the store each ending is a row: the context in
`tokens`, the ending in `tokens_b`, and the number of the question's right ending in `label`. The
rows of a question follow one another.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence

from xformer.data.arguments import whole_number
from xformer.data.display import many
from xformer.data.errors import BadInput
from xformer.data.tokenizers import HALF

from ..bad import BadRows
from .source import Row, TaskSource
from .split_files import input_files
from .tables import ENDINGS
from .tsv import add_form, add_keys, id_and_group, keys_of, open_tables

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
        help="The column that holds the context: its name in the header, or its number from 1 with "
        "--no-header. The texts of several columns are joined by a space.",
    )
    add(
        "--endings",
        required=True,
        nargs="+",
        metavar="COLUMN",
        help="Two or more columns with one ending each, or one column that holds a list of all "
        "endings: a list in JSON lines or parquet, or text that is a JSON list.",
    )
    add(
        "--label",
        required=True,
        metavar="COLUMN",
        help="The column that says which ending is right, by its number, or by its letter from A. "
        "Validation and test files may lack the column. In them an empty label or -1 means that "
        "the answer is not known.",
    )
    add(
        "--first",
        type=whole_number(0, 1),
        default=0,
        metavar="N",
        help="The number that the label column uses for the first ending, 0 or 1 (default: "
        "%(default)s).",
    )
    add_keys(parser)
    add_form(parser)


class QuestionColumns:
    """Which columns hold the context and the endings, and how their values are read.

    `choices` is the number of endings of a question; it is 0 until the first list has been read.
    """

    def __init__(self, context: Sequence[str], endings: Sequence[str]):
        self.context, self.endings = context, endings
        self.choices = len(endings) if len(endings) > 1 else 0

    @property
    def names(self) -> list[str]:
        """All columns: those of the context, then those of the endings."""
        return [*self.context, *self.endings]

    @property
    def lists(self) -> Sequence[str]:
        """The column that holds a list of endings, if there is one."""
        return self.endings if len(self.endings) == 1 else ()

    def texts(self, values: Sequence[str | None]) -> tuple[str, ...]:
        """The context and the endings of a row, from its values of `names`. Raises ValueError that
        says what is wrong with them."""
        width = len(self.context)
        context = " ".join(text for text in values[:width] if text and text.strip())
        if self.lists:
            endings = self._list(values[width] or "")
            places = [f"item {i + 1} of column {self.endings[0]!r}" for i in range(len(endings))]
        else:
            endings = [text or "" for text in values[width:]]
            places = [f"column {name!r}" for name in self.endings]
        for place, text in zip(places, endings, strict=True):
            if not text.strip():
                raise ValueError(f"{place} is empty; every question needs all its endings")
        return context, *endings

    def _list(self, text: str) -> list[str]:
        """The endings in a JSON list, which must be as long as the list of the first question."""
        name = self.endings[0]
        try:
            items = json.loads(text)
        except (ValueError, RecursionError):
            items = None
        if not isinstance(items, list):
            shown = repr(text) if len(text) <= 40 else f"{text[:37]!r}..."
            raise ValueError(
                f"column {name!r} is {shown}, which is not a list; write "
                '["one ending", "another"], or give --endings two or more columns'
            )
        if wrong := [item for item in items if isinstance(item, bool | list | dict | None)]:
            shown = json.dumps(wrong[0])[:40]
            raise ValueError(f"column {name!r} lists {shown}; every ending must be text")
        endings = [str(item) for item in items]
        if any(HALF.search(ending) for ending in endings):
            raise ValueError(f"column {name!r} holds half of a surrogate pair")
        count = many(len(endings), "ending")
        if len(endings) < 2:
            raise ValueError(f"column {name!r} lists {count}; give two or more")
        self.choices = self.choices or len(endings)
        if len(endings) != self.choices:
            raise ValueError(
                f"column {name!r} lists {count}; the first question has {self.choices}, and all "
                "questions need the same number"
            )
        return endings


def ending_of(label: str, first: int, choices: int) -> int:
    """The number of the right ending, counted from 0. `first` is the number of the first ending in
    the file. Raises ValueError that says which labels are valid."""
    if re.fullmatch("[A-Za-z]", label):
        right = ord(label.upper()) - ord("A")
    else:  # pandas writes integers as 0.0, 1.0 if some are missing
        whole = re.fullmatch(r"([0-9]{1,9})(\.0+)?", label)
        right = int(whole[1]) - first if whole else -1
    if 0 <= right < choices:
        return right
    last = first + choices - 1
    letters = f", or a letter from A to {chr(ord('A') + choices - 1)}" if choices <= 26 else ""
    hint = " (from 1 with --first 1)" if first == 0 and right == choices else ""
    raise ValueError(
        f"label {label[:40]!r} names none of the {choices} endings; it must be a number from "
        f"{first} to {last}{letters}{hint}"
    )


def read(arguments: argparse.Namespace) -> TaskSource:
    """The questions in a file, or in a directory with one file per split.

    Raises BadInput if a column is missing, and lists the columns that exist.
    """
    files = input_files(arguments, ENDINGS)
    columns = QuestionColumns(arguments.context, arguments.endings)
    names = columns.names
    if len({*names, arguments.label}) <= len(names):
        raise BadInput("--context, --endings and --label must be different columns")
    used = set[str]()
    tables = open_tables(files, names, arguments, used, UNLABELLED, columns.lists)
    keys = keys_of(arguments)
    bad = BadRows(arguments.skip_bad)

    def rows() -> Iterator[Row]:
        # every pass over the files begins with `choices` not known
        columns = QuestionColumns(arguments.context, arguments.endings)
        for table, labelled, marks in tables:
            wanted = [*names, *keys, *([arguments.label] if labelled else [])]
            for split, line, values in marks.rows(table, wanted, bad):
                label = (values[-1] or "").strip() if labelled else ""
                unknown = not label or (label == "-1" and split in UNLABELLED)
                try:
                    texts = columns.texts(values[: len(names)])
                    right = None if unknown else ending_of(label, arguments.first, columns.choices)
                except ValueError as error:
                    bad(table.path, line, str(error))
                    continue
                known = None if right is None else str(right)
                id_, group = id_and_group(values[len(names) :], arguments)
                yield Row(split, texts, known, table.path, line, id_, key=group)

    return TaskSource(
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
