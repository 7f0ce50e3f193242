"""Labelled sequences of letters, DNA and protein alike, from every form their data sets come in:

- FASTA, the label being the second field of a record's header (PLUS);
- a directory of FASTA files, one a class, named by it;
- text with three lines a record, identifier, sequence, label (Hilbert-CNN);
- delimited files, JSON lines (TAPE) and parquet with named columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from preprocess.arguments import number
from preprocess.bad import BadRows
from preprocess.binarize import check_files, read_lines
from preprocess.fasta import read_fasta
from preprocess.tables import ENDINGS, Table, ending
from preprocess.tasks import Row, Task, check_metric, find_splits, input_files
from xformer.data import tokenizers
from xformer.data.errors import BadInput

FASTA = (".fasta", ".fa", ".faa", ".fna")
SEQUENCE = ("sequence", "seq", "seqs", "primary")
LABEL = ("label", "labels", "class", "score", "target")


@dataclass(frozen=True)
class Sequences:
    """One task: its letters, whether it has classes or scores (None: the user says), the columns
    that may hold the label, how long sequences lose their middle, and how a label is read."""

    alphabet: str
    kind: str | None = None
    label: tuple[str, ...] = LABEL
    longest: int | None = None
    clean: Callable[[str], str] = str


class Record(NamedTuple):
    """A sequence, its label as it is written, where it stands, and its identifier."""

    line: int
    sequence: str
    label: str | None
    id: str | None = None


def add_arguments(parser: argparse.ArgumentParser, form: Sequences) -> None:
    """The options of a task of sequences."""
    add = parser.add_argument
    add("--sequence", metavar="COLUMN", help="The column of the sequence, in files with columns "
        f"(default: the first there is of {', '.join(SEQUENCE)}).")  # fmt: skip
    add("--label", metavar="COLUMN", help="The column of the label or score (default: the first "
        f"there is of {', '.join(form.label)}).")  # fmt: skip
    default = f"{form.longest} letters" if form.longest else "keep all"
    add("--longest", type=number(2), default=form.longest, metavar="N", help="A longer sequence "
        f"loses its middle and keeps N/2 letters of either end (default: {default}).")  # fmt: skip
    if form.kind is None:
        add("--kind", choices=("class", "score"), default="class", help="Whether the label names a "
            "class or is a number (default: %(default)s).")  # fmt: skip


def read(arguments: argparse.Namespace, form: Sequences) -> Task:
    """The task that files of sequences describe. Raises BadInput naming file and line."""
    source: Path | None = arguments.input
    classes: dict[Path, str] = {}
    endings = (*ENDINGS, *FASTA)
    if source is not None and source.is_dir() and "train" not in find_splits(source, endings):
        classes = {path: path.stem for path in sorted(source.iterdir()) if path.suffix in FASTA}
    if classes and not arguments.train:
        if arguments.valid or arguments.test:
            raise BadInput(f"{source} holds a FASTA file a class, which takes no --valid or --test")
        check_files(classes)
        files = {"": list(classes)}
    else:
        files = input_files(arguments, endings)
    bad = BadRows(arguments.skip_bad)
    letters = frozenset(form.alphabet)

    def rows() -> Iterator[Row]:
        for split, paths in files.items():
            for path in paths:
                for record in _records(path, classes.get(path), arguments, form, bad):
                    sequence = record.sequence.upper()
                    if wrong := sorted(set(sequence) - letters):
                        reason = f"letters other than {form.alphabet}: {''.join(wrong)!r}"
                        bad(path, record.line, reason)
                    elif not sequence:
                        bad(path, record.line, "the sequence is empty")
                    else:
                        if arguments.longest and len(sequence) > arguments.longest:
                            head = -(-arguments.longest // 2)
                            sequence = sequence[:head] + sequence[head - arguments.longest :]
                        label = form.clean(record.label.strip()) if record.label else None
                        yield Row(split, (sequence,), label or None, path, record.line, record.id)

    kind = form.kind or arguments.kind
    return Task(
        rows=rows,
        files=[path for paths in files.values() for path in paths],
        kind=kind,
        metric=check_metric(kind, None),
        columns={"text": arguments.sequence or "sequence", "text_b": None, "label": "label",
                 "uppercase": True},
        bad=bad,
        tokenizer=tokenizers.symbols(form.alphabet),
    )  # fmt: skip


def _records(
    path: Path, label: str | None, arguments: argparse.Namespace, form: Sequences, bad: BadRows
) -> Iterator[Record]:
    if ending(path) in FASTA or (ending(path) == ".txt" and _looks_like_fasta(path)):
        for line, header, sequence in read_fasta(path, bad):
            name, *fields = header.split() or [""]
            found = label or (fields[0] if fields else None)
            yield Record(line, sequence, found, name)
    elif ending(path) == ".txt":
        yield from _three_lines(path, bad)
    else:
        table = Table(path)
        wanted = []
        for option, given, names in (
            ("--sequence", arguments.sequence, SEQUENCE),
            ("--label", arguments.label, form.label),
        ):
            column = table.find([given] if given else names)
            if column is None and given:
                raise table.missing(given)
            if column is None:
                there = ", ".join(map(repr, table.columns))
                raise BadInput(f"{path} has the columns {there}; give {option} COLUMN")
            wanted.append(column)
        for line, values in table.rows(wanted, bad):
            yield Record(line, (values[0] or "").strip(), values[1])


def _looks_like_fasta(path: Path) -> bool:
    lines = (line for _, line in read_lines(path) if line.strip())
    starts = [line.startswith(">") for line, _ in zip(lines, range(3), strict=False)]
    return starts[:1] == [True] and starts[2:] in ([], [True])


def _three_lines(path: Path, bad: BadRows) -> Iterator[Record]:
    held: list[str] = []
    number = 0
    for number, line in read_lines(path, bad):
        if not line.strip() and not held:
            continue
        held.append(line.strip())
        if len(held) == 3:
            yield Record(number, held[1], held[2])
            held = []
    if held:
        bad(path, number, "the last record has not three lines: identifier, sequence, label")
