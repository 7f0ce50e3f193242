"""DNA tasks. `dna/splice`: the UCI splice-junction file (Kao and Lee 2021, section 4.1): sixty
letters, and whether their middle is a donor (EI), an acceptor (IE), or neither (N)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from preprocess.binarize import check_files, read_lines
from preprocess.tasks import Row, Task
from xformer.data import tokenizers
from xformer.data.errors import BadInput

LETTERS = "ACGTDNRS"  # D, N, R and S stand where a base is uncertain
SPLICE_FILES = ("splice.data", "splice.txt")
SPLICE_CLASSES = ["EI", "IE", "N"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`dna/splice` has no options beside those of every task."""


def read(arguments: argparse.Namespace) -> Task:
    """The splice task from its file, or from the directory that holds it; it has no splits.

    Raises BadInput naming file and line of a row that is not `class, name, sequence`.
    """
    path: Path = arguments.input
    if path.is_dir():
        there = [path / name for name in SPLICE_FILES if (path / name).is_file()]
        if not there:
            raise BadInput(f"{path} holds neither {' nor '.join(SPLICE_FILES)}")
        path = there[0]
    check_files([path])
    return Task(
        rows=lambda: _splice_rows(path),
        files=[path],
        kind="class",
        metric="accuracy",
        columns={"text": "sequence", "text_b": None, "label": "class", "uppercase": True},
        labels=SPLICE_CLASSES,
        tokenizer=tokenizers.symbols(LETTERS),
    )


def _splice_rows(path: Path) -> Iterator[Row]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != 3:
            raise BadInput(f"{path}:{number}: not `class, name, sequence` with two commas")
        label, _, sequence = columns
        sequence = sequence.upper()
        if label not in SPLICE_CLASSES:
            raise BadInput(f"{path}:{number}: class {label!r} is none of EI, IE, N")
        wrong = sorted(set(sequence) - set(LETTERS))
        if wrong or not sequence:
            raise BadInput(f"{path}:{number}: letters other than {LETTERS}: {''.join(wrong)!r}")
        yield Row("", (sequence,), label, path, number)
