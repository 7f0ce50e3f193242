"""DNA tasks (Kao & Lee 2021, section 2.2 and appendix G.3).

`dna/splice` reads the UCI splice-junction file: is the middle of 60 letters a donor site (EI), an
acceptor site (IE), or neither (N)? `dna/h3`, `dna/h4` and `dna/h3k9ac` ask whether a stretch of
yeast DNA is wrapped around histone H3, histone H4 or acetylated H3 (Pokholok et al. 2005). Their
files are csv, or text with three lines per record (Hilbert-CNN). `dna` reads any other labelled
DNA.
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
from .sequences import Sequences, sequence_fault
from .source import Row, TaskSource

LETTERS = "ACGTDNRS"  # of the splice file; D, N, R and S stand for an uncertain base
IUPAC = "ACGTNRYSWKMBDHV"  # the bases, and the letters that stand for several
DNA_TASKS = {
    "dna": Sequences(
        "Labelled DNA: FASTA, text with three lines per record, csv, JSON lines or parquet.", IUPAC
    ),
    "dna/h3": Sequences(
        "Is yeast DNA wrapped around histone H3? Reads Hilbert-CNN's text, or csv.", IUPAC, "class"
    ),
    "dna/h4": Sequences(
        "Is yeast DNA wrapped around histone H4? Reads Hilbert-CNN's text, or csv.", IUPAC, "class"
    ),
    "dna/h3k9ac": Sequences(
        "Is yeast DNA wrapped around acetylated H3? Reads Hilbert-CNN's text, or csv.",
        IUPAC,
        "class",
    ),
}
SPLICE_FILES = ("splice.data", "splice.txt")
SPLICE_CLASSES = ["EI", "IE", "N"]


def read(arguments: argparse.Namespace) -> TaskSource:
    """The splice task, from its file or the directory that holds it. It has no splits.

    Raises BadInput if there is no such file, or if the arguments name splits. A row is bad if it is
    not `class, name, sequence`, or if its sequence is empty or has other letters than LETTERS. With
    --skip-bad it is skipped. Otherwise reading it raises BadInput that names file and line.
    """
    path: Path | None = arguments.input
    if path is None or arguments.train or arguments.valid or arguments.test:
        raise BadInput(
            "the splice file has no splits of its own; give --input FILE|DIR and none of --train, "
            "--valid and --test"
        )
    if path.is_dir():
        files = [path / name for name in SPLICE_FILES if (path / name).is_file()]
        if not files:
            raise BadInput(f"{path} holds neither {' nor '.join(SPLICE_FILES)}")
        path = files[0]
    check_files([path])
    splits.refuse_columns(arguments.split_column, path)
    bad = BadRows(arguments.skip_bad)
    return TaskSource(
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
    """The rows of UCI's file, `class, name, sequence` on each line."""
    for number, line in read_lines(path, bad):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != 3:
            bad(path, number, "not `class, name, sequence` with two commas")
            continue
        label, _, sequence = columns
        sequence = sequence.upper()
        if fault := sequence_fault(sequence, LETTERS):
            bad(path, number, fault)
        else:
            yield Row("", (sequence,), label, path, number)
