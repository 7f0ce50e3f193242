"""The nine GLUE tasks (Wang et al. 2019), as GLUE distributes them or with named columns.

GLUE's own files are separated by tabs, without quoting, and every task has columns of its own;
copies elsewhere are csv, JSON lines or parquet with the names of Hugging Face's `glue`. Classes
may be written as names or as their numbers. GLUE's dev set is the split `valid`; a test set whose
labels GLUE keeps to itself has none here. Metrics as in Kao & Lee 2021, table 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xformer.data.errors import BadInput

from ..bad import BadRows
from ..binarize import check_files, read_lines
from . import splits
from .labelled import SPLITS, Row, Task, find_splits, input_files
from .tables import ENDINGS, Table, ending

NUMBERS = ["0", "1", "2"]
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Glue:
    """One task: the names its columns go by, its classes in the order of their numbers (none: a
    score), its metric; `broken`: GLUE's files are known to hold rows that lack columns."""

    about: str
    text: tuple[str, ...]
    text_b: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    labels: tuple[str, ...] = ()
    metric: str = "accuracy"
    broken: bool = False


TASKS = {
    "glue/cola": Glue(
        "CoLA: is a sentence acceptable?",
        ("sentence", "4"),
        label=("label", "2"),
        labels=("unacceptable", "acceptable"),
        metric="mcc",
    ),
    "glue/sst2": Glue(
        "SST-2: does a film review like it?", ("sentence",), labels=("negative", "positive")
    ),
    "glue/mrpc": Glue(
        "MRPC: do two sentences say the same?",
        ("#1 String", "sentence1"),
        ("#2 String", "sentence2"),
        ("Quality", "label"),
        ("not_equivalent", "equivalent"),
        "f1",
    ),
    "glue/qqp": Glue(
        "QQP: do two questions ask the same? Broken rows are skipped and counted.",
        ("question1",),
        ("question2",),
        ("is_duplicate", "label"),
        ("not_duplicate", "duplicate"),
        "f1",
        broken=True,
    ),
    "glue/stsb": Glue(
        "STS-B: how similar are two sentences, 0 to 5?",
        ("sentence1",),
        ("sentence2",),
        ("score", "label", "similarity_score"),
        metric="spearman",
    ),
    "glue/mnli": Glue(
        "MNLI: entailment, neutral or contradiction? Matched and mismatched.",
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
        "WNLI: does a pronoun mean this noun?",
        ("sentence1",),
        ("sentence2",),
        labels=ENTAILMENT[::-1],
    ),
}
# MNLI's matched sets are the splits valid and test, beside them the mismatched ones
MNLI_SPLITS = SPLITS | {
    f"{name}_{kind}": SPLITS[name] + suffix
    for name in ("dev", "validation", "test")
    for kind, suffix in (("matched", ""), ("mismatched", "_mismatched"))
}
HIDDEN = ("-1", "-1.0")  # Hugging Face's mark of a label that GLUE keeps to itself
MRPC_TRAIN, MRPC_TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
MRPC_DEV = ("dev_ids.tsv", "mrpc_dev_ids.tsv")
MRPC_IDS = ["#1 ID", "#2 ID"]


class Part(NamedTuple):
    """One file; `dev` are the pairs of ids in it that belong to the split valid."""

    split: str
    table: Table
    dev: frozenset[tuple[str, ...]] = frozenset()

    def splits(self) -> list[str]:
        return [self.split, *(["valid"] if self.dev else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """GLUE's tasks have no options beside those of every task."""


def read(arguments: argparse.Namespace, name: str) -> Task:
    """The task `name` from its directory. Raises BadInput for a missing file or column."""
    glue = TASKS[name]
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
    given = arguments.split_column
    marks = [splits.find(p.table, given, _columns(p, glue), p.split, used) for p in parts]
    return Task(
        rows=lambda: (
            row
            for part, mark in zip(parts, marks, strict=True)
            for row in _rows(part, mark, glue, bad)
        ),
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


def _open(path: Path, split: str, glue: Glue) -> Table:
    """One file with all the columns it must have; the labels of a test set may be missing."""
    table = Table(path)
    headed = table.find(glue.text) is not None or ending(path) not in (".tsv", ".txt")
    if "4" in glue.text and not headed and len(table.columns) == 4:
        table = Table(path, replace(table.form, header=False))  # CoLA's training file
    for names in (glue.text, glue.text_b, glue.label):
        if (
            names
            and table.find(names) is None
            and not (split.startswith("test") and names == glue.label)
        ):
            raise table.missing(names[0])
    return table


def _columns(part: Part, glue: Glue) -> list[str]:
    """The columns of the texts and, if there is one, of the label."""
    found = (part.table.find(names) for names in (glue.text, glue.text_b, glue.label))
    return [column for column in found if column]


def _rows(part: Part, marks: splits.SplitColumns, glue: Glue, bad: BadRows) -> Iterator[Row]:
    table, dev = part.table, part.dev
    texts = [column for names in (glue.text, glue.text_b) if (column := table.find(names))]
    label = table.find(glue.label)
    wanted = [*_columns(part, glue), *(MRPC_IDS if dev else [])]
    for split, line, values in marks.rows(table, wanted, bad):
        found = (values[len(texts)] or "").strip() if label else ""
        if found in NUMBERS[: len(glue.labels)]:
            found = glue.labels[int(found)]
        elif found in HIDDEN and split.startswith("test"):
            found = ""
        if dev:
            split = "valid" if tuple(map(str, values[-2:])) in dev else "train"
        pair = tuple(value or "" for value in values[: len(texts)])
        yield Row(split, pair, found or None, table.path, line)


def _mnli(arguments: argparse.Namespace, directory: Path, glue: Glue) -> list[Part]:
    """MNLI has two sets to validate on, and two to test on."""
    found = find_splits(directory, ENDINGS, MNLI_SPLITS)
    given = {name: getattr(arguments, name) for name in ("train", "valid", "test")}
    found |= {name: paths for name, paths in given.items() if paths}
    for name in ("train", "valid", "valid_mismatched"):
        if name not in found:
            raise BadInput(
                f"{directory} holds no file of the split {name} "
                "(train.tsv, dev_matched.tsv, dev_mismatched.tsv)"
            )
    check_files(path for paths in found.values() for path in paths)
    return [
        Part(split, _open(path, split, glue)) for split, paths in found.items() for path in paths
    ]


def _is_original(arguments: argparse.Namespace, directory: Path) -> bool:
    path = directory / MRPC_TRAIN
    if arguments.train or not path.is_file():
        return False
    return find_splits(directory, ENDINGS).get("train") == [path]


def _original_mrpc(arguments: argparse.Namespace, directory: Path, glue: Glue) -> list[Part]:
    """Microsoft's two files: GLUE drew its dev set from the training file, by pairs of ids."""
    lists = [directory / name for name in MRPC_DEV if (directory / name).is_file()]
    if not lists and not arguments.valid:
        raise BadInput(f"{directory} lacks {MRPC_DEV[0]}, the ids of GLUE's dev set")
    valid = arguments.valid or []
    lists = [] if valid else lists[:1]
    dev = frozenset(tuple(line.split()) for path in lists for _, line in read_lines(path))
    test = arguments.test or [directory / MRPC_TEST]
    check_files([directory / MRPC_TRAIN, *valid, *test])
    parts = [Part("train", _open(directory / MRPC_TRAIN, "train", glue), dev)]
    parts += [Part("valid", _open(path, "valid", glue)) for path in valid]
    return parts + [Part("test", _open(path, "test", glue)) for path in test]
