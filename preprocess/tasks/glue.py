"""The nine GLUE tasks (Wang et al. 2019), as GLUE distributes them or with named columns.

GLUE's own files are separated by tabs, without quoting, and each task has its own columns. Copies
elsewhere are csv, JSON lines or parquet, with the columns of Hugging Face's `glue`. Classes may be
written as names or as numbers. GLUE's dev set is the split `valid`. Test sets whose labels GLUE
does not publish have no labels here either. The metrics are those of Kao & Lee 2021, table 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xformer.data.errors import BadInput
from xformer.data.store import SPLIT_NAMES

from ..bad import BadRows
from ..binarize import check_files, read_lines
from . import splits
from .source import Row, TaskSource
from .split_files import find_splits, input_files
from .tables import ENDINGS, RowTable, extension

NUMBERS = ["0", "1", "2"]
COLUMNS = ("text", "text_b", "label")  # fields of Glue and options that name a column
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Glue:
    """One GLUE task, with the names that each of its columns may have."""

    about: str
    text: tuple[str, ...]
    text_b: tuple[str, ...] = ()  # empty: the task has one text
    label: tuple[str, ...] = ("label",)
    labels: tuple[
        str, ...
    ] = ()  # classes in the order of their numbers; empty: the task has scores
    metric: str = "accuracy"
    broken: bool = False  # GLUE's own files hold rows that lack columns


GLUE_TASKS = {
    "glue/cola": Glue(
        "CoLA: is a sentence acceptable?",
        ("sentence", "4"),
        label=("label", "2"),
        labels=("unacceptable", "acceptable"),
        metric="mcc",
    ),
    "glue/sst2": Glue(
        "SST-2: is a film review positive?", ("sentence",), labels=("negative", "positive")
    ),
    "glue/mrpc": Glue(
        "MRPC: do two sentences mean the same?",
        ("#1 String", "sentence1"),
        ("#2 String", "sentence2"),
        ("Quality", "label"),
        ("not_equivalent", "equivalent"),
        "f1",
    ),
    "glue/qqp": Glue(
        "QQP: do two questions ask the same? Rows that lack columns are left out and counted.",
        ("question1",),
        ("question2",),
        ("is_duplicate", "label"),
        ("not_duplicate", "duplicate"),
        "f1",
        broken=True,
    ),
    "glue/stsb": Glue(
        "STS-B: how similar are two sentences, from 0 to 5?",
        ("sentence1",),
        ("sentence2",),
        ("score", "label", "similarity_score"),
        metric="spearman",
    ),
    "glue/mnli": Glue(
        "MNLI: entailment, neutral or contradiction? It has matched and mismatched sets.",
        ("sentence1", "premise"),
        ("sentence2", "hypothesis"),
        ("gold_label", "label"),
        ("entailment", "neutral", "contradiction"),
    ),
    "glue/qnli": Glue(
        "QNLI: does a sentence answer a question?", ("question",), ("sentence",), labels=ENTAILMENT
    ),
    "glue/rte": Glue(
        "RTE: does one sentence follow from another?",
        ("sentence1",),
        ("sentence2",),
        labels=ENTAILMENT,
    ),
    "glue/wnli": Glue(
        "WNLI: does a pronoun refer to this noun?",
        ("sentence1",),
        ("sentence2",),
        labels=ENTAILMENT[::-1],
    ),
}
# MNLI's matched sets are the splits valid and test; its mismatched sets have their own
MNLI_SPLITS = SPLIT_NAMES | {
    f"{name}_{kind}": SPLIT_NAMES[name] + suffix
    for name in ("dev", "validation", "test")
    for kind, suffix in (("matched", ""), ("mismatched", "_mismatched"))
}
HIDDEN = ("-1", "-1.0")  # what Hugging Face writes for a label that GLUE does not publish
MRPC_TRAIN, MRPC_TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
MRPC_DEV = ("dev_ids.tsv", "mrpc_dev_ids.tsv")
MRPC_IDS = ["#1 ID", "#2 ID"]


class Part(NamedTuple):
    """One file of a task."""

    split: str
    table: RowTable
    dev: frozenset[tuple[str, ...]] = frozenset()  # pairs of ids that belong to the split valid

    def splits(self) -> list[str]:
        """The splits that the file has rows of."""
        return [self.split, *(["valid"] if self.dev else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a GLUE task."""
    for option, holds in (
        ("--text", "first text"),
        ("--text-b", "second text"),
        ("--label", "label or score"),
    ):
        parser.add_argument(
            option,
            metavar="COLUMN",
            default=argparse.SUPPRESS,  # so that a store records it only if it is given
            help=f"The column of the {holds} (default: as GLUE and its copies name it).",
        )


def read(arguments: argparse.Namespace, name: str) -> TaskSource:
    """The task `name`, from its directory or files. Raises BadInput if a file or column is
    missing."""
    glue = _renamed(GLUE_TASKS[name], arguments, name)
    source: Path | None = arguments.input
    if name == "glue/mnli" and source is not None and source.is_dir():
        parts = _mnli(arguments, source, glue)
    elif name == "glue/mrpc" and source is not None and _is_original(arguments, source):
        parts = _original_mrpc(arguments, source, glue)
    else:
        parts = [
            Part(split, _open(path, split, glue))
            for split, paths in input_files(arguments, ENDINGS).items()
            for path in paths
        ]
    bad, used = BadRows(arguments.skip_bad or glue.broken), set[str]()
    first = parts[0].table
    marks = [
        splits.find(part.table, arguments.split_column, _columns(part, glue), part.split, used)
        for part in parts
    ]

    def rows() -> Iterator[Row]:
        for part, part_marks in zip(parts, marks, strict=True):
            yield from _rows(part, part_marks, glue, bad)

    return TaskSource(
        rows=rows,
        files=[part.table.path for part in parts],
        kind="class" if glue.labels else "score",
        metric=glue.metric,
        columns={
            "text": glue.text[0] if first.columns[0] == "1" else first.find(glue.text),
            "text_b": first.find(glue.text_b),
            "label": first.find(glue.label),
        },
        bad=bad,
        splits=[(split, part.table.path) for part in parts for split in part.splits()],
        labels=list(glue.labels) or None,
        pairs=bool(glue.text_b),
        split_columns=used,
    )


def _renamed(glue: Glue, arguments: argparse.Namespace, name: str) -> Glue:
    """The task with the names that the user gives to its columns. Raises BadInput for a second text
    that the task does not have."""
    own = {key: (column,) for key, column in vars(arguments).items() if key in COLUMNS}
    if "text_b" in own and not glue.text_b:
        raise BadInput(f"--text-b {arguments.text_b}: {name} has one text; leave it out")
    return replace(
        glue,
        text=own.get("text", glue.text),
        text_b=own.get("text_b", glue.text_b),
        label=own.get("label", glue.label),
    )


def _open(path: Path, split: str, glue: Glue) -> RowTable:
    """One file of a task. Raises BadInput if it lacks a column; only a test set may lack labels."""
    table = RowTable(path)
    has_header = table.find(glue.text) is not None or extension(path) not in (".tsv", ".txt")
    if "4" in glue.text and not has_header and len(table.columns) == 4:
        table = RowTable(path, replace(table.form, header=False))  # CoLA's training file
    required = [glue.text, glue.text_b, *([] if split.startswith("test") else [glue.label])]
    for names in required:
        if names and table.find(names) is None:
            options = {glue.text: "--text", glue.text_b: "--text-b", glue.label: "--label"}
            raise BadInput(f"{table.missing(names[0])}; {options[names]} names another")
    return table


def _columns(part: Part, glue: Glue) -> list[str]:
    """The columns of the texts and, if there is one, of the label."""
    columns = (part.table.find(names) for names in (glue.text, glue.text_b, glue.label))
    return [column for column in columns if column]


def _rows(part: Part, marks: splits.SplitColumns, glue: Glue, bad: BadRows) -> Iterator[Row]:
    """The rows of one file, with the names of their classes."""
    table, dev = part.table, part.dev
    texts = [column for names in (glue.text, glue.text_b) if (column := table.find(names))]
    has_label = table.find(glue.label) is not None
    wanted = [*_columns(part, glue), *(MRPC_IDS if dev else [])]
    for split, line, values in marks.rows(table, wanted, bad):
        label = (values[len(texts)] or "").strip() if has_label else ""
        if label in NUMBERS[: len(glue.labels)]:
            label = glue.labels[int(label)]
        elif label in HIDDEN and split.startswith("test"):
            label = ""
        if dev:
            split = "valid" if tuple(map(str, values[-2:])) in dev else "train"
        row_texts = tuple(value or "" for value in values[: len(texts)])
        yield Row(split, row_texts, label or None, table.path, line)


def _mnli(arguments: argparse.Namespace, directory: Path, glue: Glue) -> list[Part]:
    """The files of MNLI, which has two validation sets and two test sets."""
    files = find_splits(directory, ENDINGS, MNLI_SPLITS)
    by_option = {name: getattr(arguments, name) for name in ("train", "valid", "test")}
    files |= {name: paths for name, paths in by_option.items() if paths}
    for name in ("train", "valid", "valid_mismatched"):
        if name not in files:
            raise BadInput(
                f"{directory} holds no file of the split {name}; it needs train.tsv, "
                "dev_matched.tsv and dev_mismatched.tsv"
            )
    check_files(path for paths in files.values() for path in paths)
    return [
        Part(split, _open(path, split, glue)) for split, paths in files.items() for path in paths
    ]


def _is_original(arguments: argparse.Namespace, directory: Path) -> bool:
    """Whether a directory holds MRPC as Microsoft published it."""
    path = directory / MRPC_TRAIN
    if arguments.train or not path.is_file():
        return False
    return find_splits(directory, ENDINGS).get("train") == [path]


def _original_mrpc(arguments: argparse.Namespace, directory: Path, glue: Glue) -> list[Part]:
    """Microsoft's two files. GLUE drew its dev set from the training file, by pairs of ids."""
    id_files = [directory / name for name in MRPC_DEV if (directory / name).is_file()]
    if not id_files and not arguments.valid:
        raise BadInput(
            f"{directory} lacks {MRPC_DEV[0]}, the ids of GLUE's dev set; add it, or give --valid"
        )
    valid = arguments.valid or []
    id_files = [] if valid else id_files[:1]
    dev = frozenset(tuple(line.split()) for path in id_files for _, line in read_lines(path))
    test = arguments.test or [directory / MRPC_TEST]
    check_files([directory / MRPC_TRAIN, *valid, *test])
    parts = [Part("train", _open(directory / MRPC_TRAIN, "train", glue), dev)]
    parts += [Part("valid", _open(path, "valid", glue)) for path in valid]
    return parts + [Part("test", _open(path, "test", glue)) for path in test]
