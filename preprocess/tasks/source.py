"""What the reader of a data set returns: a `TaskSource`, which yields each `Row`.

Also the options --labels and --metric, which several readers have.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xformer.data.display import many
from xformer.data.errors import BadInput
from xformer.data.tokenizers import Tokenizer

from ..bad import BadRows

CLASS_METRICS = ("accuracy", "f1", "mcc")
SCORE_METRICS = ("spearman", "pearson")
TAG_METRICS = ("accuracy", "f1", "entity_f1")


class Row(NamedTuple):
    """One example, as the raw file writes it.

    `texts` holds one text or two. In a choice task it holds a context and all its endings, and the
    label is the number of the right ending, counted from 0. In a tagging task the label holds the
    labels of all words, separated by spaces.
    """

    split: str  # "" if the source does not say; the split is then drawn
    texts: tuple[str, ...]
    label: str | None  # None: the row has no label
    file: Path
    line: int
    id: str | None = None  # the source's own name for the row
    group: str | None = None  # rows of one group, such as segments of a piece, are scored together
    key: str | None = None  # rows with the same key are drawn into the same split (None: the texts)


@dataclass(frozen=True)
class TaskSource:
    """A data set as its reader describes it: where the rows are and what the labels mean."""

    rows: Callable[[], Iterator[Row]]  # each call reads the files again
    files: list[Path]
    kind: str  # "class", "score", "tag" or "choice"
    metric: str | None  # None (tagging only): chosen by the names of the classes
    columns: dict[str, Any]  # which column of the raw file is which, for `evaluate.py input=`
    bad: BadRows
    splits: Sequence[tuple[str, Path]] = ()  # splits that must hold a row, with one file of each
    left_out: BadRows = field(default_factory=lambda: BadRows(skip=True))  # not part of the task
    labels: list[str] | None = None  # classes in order (None: those in training, sorted by name)
    tokenizer: Tokenizer | None = None  # used if the user gives none
    pairs: bool = False  # whether a row has two texts
    group: str = ""  # the column of --group, whose rows with equal values stay in one split
    split_columns: set[str] = field(default_factory=set)  # the columns that named splits so far

    @property
    def place(self) -> str:
        """Its files, for a message: "a.tsv" or "a.tsv and 7 other files"."""
        more = len(self.files) - 1
        return f"{self.files[0]} and {many(more, 'other file')}" if more else str(self.files[0])

    @property
    def noun(self) -> str:
        """What has a label, in the plural."""
        return "words" if self.kind == "tag" else "rows"

    @property
    def has_classes(self) -> bool:
        """Whether labels are the names of classes."""
        return self.kind in ("class", "tag")


def add_labels(parser: argparse.ArgumentParser) -> None:
    """Add --labels."""
    parser.add_argument(
        "--labels",
        metavar="A,B,C",
        help='The classes in the order of their ids; "X, Y" is a name with a comma (default: those '
        "of the training file, sorted by name).",
    )


def given_labels(names: str | None) -> list[str] | None:
    """The classes of --labels. Raises BadInput if a name is empty or repeated."""
    if not names:
        return None
    if len(names.splitlines()) > 1:
        raise BadInput("--labels: give all names in one line")
    labels = [name.strip() for name in next(csv.reader([names], skipinitialspace=True))]
    if len(set(labels)) != len(labels):
        raise BadInput(f"--labels {names}: give each class once")
    if "" in labels:
        raise BadInput(f"--labels {names}: a name is empty; leave out the extra comma")
    return labels


def check_metric(kind: str, metric: str | None) -> str:
    """The metric to report, by default accuracy or spearman.

    Raises BadInput if `metric` does not fit the kind of task.
    """
    allowed = {"class": CLASS_METRICS, "score": SCORE_METRICS}[kind]
    if metric is None:
        return allowed[0]
    if metric not in allowed:
        raise BadInput(
            f"--metric {metric} does not fit --kind {kind}; choose one of {', '.join(allowed)}"
        )
    return metric
