"""DNA tasks (Kao & Lee 2021, section 2.2 and appendix G.3).

`dna/splice`: the UCI splice-junction file, sixty letters, and whether their middle is a donor (EI),
an acceptor (IE), or neither (N). `dna/h3`, `dna/h4`, `dna/h3k9ac`: does a stretch of yeast DNA
wrap round a histone with this mark (Pokholok et al. 2005), as text of three lines a record
(Hilbert-CNN) or csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from xformer.data import vocabularies
from xformer.data.errors import BadInput

from ..bad import BadRows
from ..binarize import check_files, read_lines
from . import splits
from .labelled import Row, Task
from .sequences import Sequences

LETTERS = "ACGTDNRS"  # D, N, R and S stand where a base is uncertain
IUPAC = "ACGTNRYSWKMBDHV"  # the bases, and the letters that stand for several
TASKS = {
    name: Sequences(IUPAC, kind)
    for name, kind in (
        ("dna", None),
        ("dna/h3", "class"),
        ("dna/h4", "class"),
        ("dna/h3k9ac", "class"),
    )
}
ABOUTS = {
    "dna": "Labelled DNA: FASTA, three lines a record, csv, JSON lines.",
    "dna/h3": "Yeast DNA and the histone H3: Hilbert-CNN's text, or csv.",
    "dna/h4": "Yeast DNA and the histone H4: Hilbert-CNN's text, or csv.",
    "dna/h3k9ac": "Yeast DNA and acetylated H3: Hilbert-CNN's text, or csv.",
}
SPLICE_FILES = ("splice.data", "splice.txt")
SPLICE_CLASSES = ["EI", "IE", "N"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`dna/splice` has no options beside those of every task."""


def read(arguments: argparse.Namespace) -> Task:
    """The splice task from its file, or from the directory that holds it; it has no splits.

    Raises BadInput naming file and line of a row that is not `class, name, sequence`.
    """
    path: Path | None = arguments.input
    if path is None or arguments.train or arguments.valid or arguments.test:
        raise BadInput("the splice file has no splits of its own; give --input FILE|DIR alone")
    if path.is_dir():
        there = [path / name for name in SPLICE_FILES if (path / name).is_file()]
        if not there:
            raise BadInput(f"{path} holds neither {' nor '.join(SPLICE_FILES)}")
        path = there[0]
    check_files([path])
    splits.refuse_columns(arguments.split_column, path)
    bad = BadRows(arguments.skip_bad)
    return Task(
        rows=lambda: splice_rows(path, bad),
        files=[path],
        kind="class",
        metric="accuracy",
        columns={"text": "sequence", "text_b": None, "label": "class", "uppercase": True},
        bad=bad,
        labels=SPLICE_CLASSES,
        tokenizer=vocabularies.symbols(LETTERS),
    )


def splice_rows(path: Path, bad: BadRows) -> Iterator[Row]:
    """The rows of UCI's file: class, name, sequence."""
    for number, line in read_lines(path, bad):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != 3:
            bad(path, number, "not `class, name, sequence` with two commas")
            continue
        label, _, sequence = columns
        sequence = sequence.upper()
        wrong = sorted(set(sequence) - set(LETTERS))
        if wrong or not sequence:
            bad(path, number, f"letters other than {LETTERS}: {''.join(wrong)!r}")
        else:
            yield Row("", (sequence,), label, path, number)
