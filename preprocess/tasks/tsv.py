"""Any table with a column of text, perhaps a second one, and a column of labels or scores."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from xformer.data.display import say
from xformer.data.errors import BadInput

from ..bad import BadRows
from . import splits
from .source import (
    CLASS_METRICS,
    SCORE_METRICS,
    Row,
    TaskSource,
    add_labels,
    check_metric,
    given_labels,
)
from .split_files import input_files
from .tables import ENDINGS, Form, RowTable, extension

HEADERS = ("label", "labels", "class", "target", "category", "gold_label", "answer")
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "space": " ", "\\t": "\t"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task tsv`."""
    add = parser.add_argument
    add(
        "--text",
        required=True,
        metavar="COLUMN",
        help="The column that holds the text: its name in the header, or its number from 1 with "
        "--no-header.",
    )
    add("--text-b", metavar="COLUMN", help="The column of a second text, for tasks on pairs.")
    add(
        "--label",
        required=True,
        metavar="COLUMN",
        help="The column of the label or score. A test file may lack it.",
    )
    add(
        "--kind",
        choices=("class", "score"),
        default="class",
        help="Whether the label column names a class or holds a number (default: %(default)s).",
    )
    add_labels(parser)
    add(
        "--metric",
        choices=CLASS_METRICS + SCORE_METRICS,
        help="The metric by which training selects the best checkpoint, unless train.metric names "
        "another (default: accuracy for classes, spearman for scores). With two classes, f1 is "
        "that of the second one in the order of --labels.",
    )
    add_keys(parser)
    add_form(parser)


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add --id and --group."""
    add = parser.add_argument
    add(
        "--id",
        metavar="COLUMN",
        help="A column that names each row, such as a key of your database. The store keeps it, "
        "and tables of predictions show it as `id`. Its values must differ (default: none).",
    )
    add(
        "--group",
        metavar="COLUMN",
        help="A column with the group of each row, such as its author, patient or protein family. "
        "If splits are drawn, all rows of a group go to the same split. A row with an empty cell "
        "belongs to no group. Case matters (default: only rows with equal texts stay together).",
    )


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how lines are split into columns; `form_of` reads them."""
    add = parser.add_argument
    add(
        "--delimiter",
        metavar="CHAR",
        help="What separates the columns: one character, or one of tab, comma, semicolon, space "
        "(default: tab for .tsv and .txt, comma for .csv).",
    )
    add(
        "--quoting",
        metavar="CHAR",
        help="The character that may enclose a column, or none, which makes quotes ordinary "
        'characters (default: none with tabs, " otherwise).',
    )
    add(
        "--no-header",
        action="store_true",
        help="The first line is a row like all others, and columns are named by their numbers, "
        "from 1 (default: the first line names the columns).",
    )


def form_of(path: Path, arguments: argparse.Namespace) -> Form:
    """How the lines of a file are split into columns, by the task's options and the file's name.
    Raises BadInput if an option is not one character."""
    delimiter = arguments.delimiter or ("," if extension(path) == ".csv" else "\t")
    delimiter = DELIMITERS.get(delimiter, delimiter)
    if len(delimiter) != 1:
        raise BadInput(
            f"--delimiter {arguments.delimiter!r} is not one character; give one, or tab, comma, "
            "semicolon, space"
        )
    quote = arguments.quoting or ("none" if delimiter == "\t" else '"')
    if quote != "none" and len(quote) != 1:
        raise BadInput(f"--quoting {arguments.quoting!r} is neither one character nor none")
    hint = "; see --quoting, --delimiter"
    own = None if quote == "none" else quote
    return Form(delimiter, own, not arguments.no_header, hint, guessed=not arguments.quoting)


def open_tables(
    files: dict[str, list[Path]],
    names: Sequence[str],
    arguments: argparse.Namespace,
    used: set[str],
    unlabelled: Sequence[str] = ("test",),
    lists: Sequence[str] = (),
) -> list[tuple[RowTable, bool, splits.SplitColumns]]:
    """(table, whether it has labels, the columns that name the splits of its rows) of every file.

    Every file must have the columns `names` and those of --id and --group. It must also have the
    label column, unless it is a file of a split in `unlabelled`. `used` collects the columns that
    name splits. `lists` is passed on to `RowTable`. Raises BadInput if a column is missing, and
    lists those that exist.
    """
    names = [*names, *keys_of(arguments)]
    tables, with_label = [], [*names, arguments.label]
    for split, paths in files.items():
        for path in paths:
            table = RowTable(path, form_of(path, arguments), lists)
            labelled = arguments.label in table.columns
            for name in names if not labelled and split in unlabelled else with_label:
                if name not in table.columns:
                    raise table.missing(name)
            if (
                arguments.no_header
                and labelled
                and table.kind not in (".jsonl", ".json", ".parquet")
            ):
                _warn_of_header(table, names[0], arguments.label)
            marks = splits.find(table, arguments.split_column, with_label, split, used)
            tables.append((table, labelled, marks))
    return tables


def _warn_of_header(table: RowTable, text: str, label: str) -> None:
    """Say so if the first row of a file that was called headerless names its columns."""
    for line, (first, named) in table.rows([text, label], BadRows(skip=True)):
        if (named or "").strip().lower() in HEADERS and " " not in (first or "").strip():
            say(
                f'warning: {table.path}: line {line} looks like a header (its label is "{named}"), '
                "but with --no-header it is a row; leave the option out",
                error=True,
            )
        return


def keys_of(arguments: argparse.Namespace) -> list[str]:
    """The columns of --id and --group, as far as they are given."""
    return [name for name in (arguments.id, arguments.group) if name]


def id_and_group(
    values: Sequence[str | None], arguments: argparse.Namespace
) -> tuple[str | None, str | None]:
    """The id of a row and its group, from its values of `keys_of`, which come first in `values`.
    None stands for one that is not given; an empty cell is an id, but no group."""
    row = dict(zip(keys_of(arguments), values, strict=False))
    id_ = (row[arguments.id] or "") if arguments.id else None
    return id_, group_of(row.get(arguments.group))


def group_of(cell: str | None) -> str | None:
    """The group that a cell names; None if it is empty. pandas writes 7 as 7.0 if other cells of
    the column are empty, in one file and not in the next, so both are one group."""
    return (cell or "").strip().removesuffix(".0") or None


def read(arguments: argparse.Namespace) -> TaskSource:
    """The rows of a file, or of a directory with one file per split.

    Raises BadInput if a column is missing, and lists the columns that exist.
    """
    files = input_files(arguments, ENDINGS)
    names = [arguments.text] + ([arguments.text_b] if arguments.text_b else [])
    if len({*names, arguments.label}) <= len(names):
        raise BadInput("--text, --text-b and --label must be different columns")
    used = set[str]()
    tables, keys = open_tables(files, names, arguments, used), keys_of(arguments)
    bad = BadRows(arguments.skip_bad)

    def rows() -> Iterator[Row]:
        for table, labelled, marks in tables:
            wanted = [*names, *keys, *([arguments.label] if labelled else [])]
            for split, line, values in marks.rows(table, wanted, bad):
                texts = tuple(value or "" for value in values[: len(names)])
                label = (values[-1] or "").strip() if labelled else ""
                id_, group = id_and_group(values[len(names) :], arguments)
                yield Row(split, texts, label or None, table.path, line, id_, key=group)

    if arguments.labels and arguments.kind == "score":
        raise BadInput(f"--labels {arguments.labels} needs --kind class")
    return TaskSource(
        rows=rows,
        files=[path for paths in files.values() for path in paths],
        kind=arguments.kind,
        metric=check_metric(arguments.kind, arguments.metric),
        columns={"text": arguments.text, "text_b": arguments.text_b, "label": arguments.label},
        bad=bad,
        splits=[(split, paths[0]) for split, paths in files.items()],
        labels=given_labels(arguments.labels),
        pairs=len(names) == 2,
        split_columns=used,
    )
