"""Labelled sequences of letters, DNA and protein alike, from every form their data sets come in:

- FASTA, the label being the second field of a record's header (PLUS), and a third field "test" the
  mark of a test row (DeepLoc); or fields such as `TARGET=1.5 SET=train VALIDATION=False` (FLIP);
- a directory of FASTA files, one a class, named by it;
- text with three lines a record, identifier, sequence, label (Hilbert-CNN);
- delimited files, JSON lines (TAPE) and parquet with named columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from xformer.data import vocabularies
from xformer.data.display import say
from xformer.data.errors import BadInput

from ..arguments import whole_number as number
from ..bad import BadRows
from ..binarize import check_files, read_lines
from ..corpora.fasta import read_fasta
from . import splits
from .labelled import Row, Task, check_metric, find_splits, input_files
from .tables import ENDINGS, Table, ending, stem

FASTA = (".fasta", ".fa", ".faa", ".fna")
SEQUENCE = ("sequence", "seq", "seqs", "primary")
LABEL = ("label", "labels", "class", "score", "target")


@dataclass(frozen=True)
class Sequences:
    """One task: its letters, whether it has classes or scores (None: the user says), the columns
    that may hold the label, how long sequences lose their middle, how a label is read, the class
    that the task leaves out, and which field of a FASTA header holds the label (the name is 0)."""

    alphabet: str
    kind: str | None = None
    label: tuple[str, ...] = LABEL
    longest: int | None = None
    clean: Callable[[str], str] = str
    without: str | None = None
    field: int = 1


class Record(NamedTuple):
    """A sequence, its label as it is written, where it stands, its identifier, and the split that
    it is marked as ("": none)."""

    line: int
    sequence: str
    label: str | None
    id: str | None = None
    split: str = ""


def add_arguments(parser: argparse.ArgumentParser, form: Sequences) -> None:
    """The options of a task of sequences."""
    add = parser.add_argument
    add(
        "--sequence",
        metavar="COLUMN",
        help="The column of the sequence, in files with columns "
        f"(default: the first there is of {', '.join(SEQUENCE)}).",
    )
    add(
        "--label",
        metavar="COLUMN",
        help="The column of the label or score (default: the first "
        f"there is of {', '.join(form.label)}).",
    )
    default = f"{form.longest} letters" if form.longest else "keep all"
    add(
        "--longest",
        type=number(2),
        default=form.longest,
        metavar="N",
        help="A longer sequence "
        f"loses its middle and keeps N/2 letters of either end (default: {default}).",
    )
    if form.kind is None:
        add(
            "--kind",
            choices=("class", "score"),
            default="class",
            help="Whether the label names a class or is a number (default: %(default)s).",
        )


def read(arguments: argparse.Namespace, form: Sequences) -> Task:
    """The task that files of sequences describe. Raises BadInput naming file and line."""
    classes = _classes(arguments)
    files = {"": list(classes)} if classes else input_files(arguments, (*ENDINGS, *FASTA))
    places = [(split, path) for split, paths in files.items() for path in paths]
    found = {path: _columns(path, split, arguments, form) for split, path in places}
    used = set[str]()
    marks = {
        path: _marks(path, split, arguments.split_column, found[path], used)
        for split, path in places
    }
    bad, left_out = BadRows(arguments.skip_bad), BadRows(skip=True)
    letters = frozenset(form.alphabet)

    def rows() -> Iterator[Row]:
        for split, path in places:
            for record in records(path, classes.get(path), found[path], form, bad, marks[path]):
                sequence = record.sequence.upper()
                label = form.clean((record.label or "").strip())
                if wrong := sorted(set(sequence) - letters):
                    reason = f"letters other than {form.alphabet}: {''.join(wrong)!r}"
                    bad(path, record.line, reason)
                elif not sequence:
                    bad(path, record.line, "the sequence is empty")
                elif label and label == form.without:
                    left_out(path, record.line, f"{label} is no class of this task")
                else:
                    sequence = both_ends(sequence, arguments.longest)
                    where = split or record.split
                    yield Row(where, (sequence,), label or None, path, record.line, record.id)

    kind = form.kind or arguments.kind
    first = next(iter(found.values()))
    return Task(
        rows=rows,
        files=list(found),
        kind=kind,
        metric=check_metric(kind, None),
        columns={
            "text": first[0] if first else "sequence",
            "text_b": None,
            "label": first[-1] if first else "label",
            "uppercase": True,
            "longest": arguments.longest,
        },
        bad=bad,
        splits=[(split, paths[0]) for split, paths in files.items()],
        left_out=left_out,
        tokenizer=vocabularies.symbols(form.alphabet),
        split_columns=used,
    )


def both_ends(sequence: str, longest: int | None) -> str:
    """The sequence, without its middle if it is longer than `longest`."""
    if not longest or len(sequence) <= longest:
        return sequence
    head = -(-longest // 2)
    return sequence[:head] + sequence[head - longest :]


def _classes(arguments: argparse.Namespace) -> dict[Path, str]:
    """file -> class of a directory with a FASTA file a class; none of a directory of splits."""
    source: Path | None = arguments.input
    if source is None or not source.is_dir() or arguments.train:
        return {}
    fasta = [
        path
        for path in sorted(source.iterdir())
        if ending(path) in FASTA and not path.name.startswith(".")
    ]
    splits = find_splits(source, (*ENDINGS, *FASTA))
    if "train" in splits:
        used = [path for paths in splits.values() for path in paths]
        if others := [path.name for path in fasta if path not in used]:
            names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            say(
                f"note: {source} holds {splits['train'][0].name}, so its files are splits, not "
                f"classes; not read: {names}",
                error=True,
            )
        return {}
    if fasta and (arguments.valid or arguments.test):
        raise BadInput(f"{source} holds a FASTA file a class, which takes no --valid or --test")
    check_files(fasta)
    return {path: stem(path) for path in fasta}


def _columns(
    path: Path, split: str, arguments: argparse.Namespace, form: Sequences
) -> list[str] | None:
    """The columns of the sequence and the label (a test file may lack it); None: it has none."""
    if ending(path) in (*FASTA, ".txt"):
        return None
    table = Table(path)
    wanted = []
    for option, given, names in (
        ("--sequence", arguments.sequence, SEQUENCE),
        ("--label", arguments.label, form.label),
    ):
        column = table.find([given] if given else names)
        if column is not None:
            wanted.append(column)
        elif option == "--sequence" or split != "test":
            if given:
                raise table.missing(given)
            raise BadInput(f"{path} has the columns {table.shown()}; give {option} COLUMN")
    return wanted


Marks = splits.SplitColumns | set[str] | None  # of a table; of FASTA headers; None: not read


def _marks(
    path: Path, split: str, given: str | None, columns: list[str] | None, used: set[str]
) -> Marks:
    """What names the split of a file's rows. `used` is to gather what was read of it."""
    if columns is not None:
        return splits.find(Table(path), given, columns, split, used)
    splits.refuse_columns(given, path)
    if split and (said := splits.of_header(_first_line(path).split()[1:])):
        splits.note_unread(path, f"field {next(iter(said)).upper()}= in the headers", split)
    return None if split or given == splits.NONE else used


def _first_line(path: Path) -> str:
    lines = (line.strip() for _, line in read_lines(path, BadRows(skip=True)))
    return next(filter(None, lines), "")


def records(
    path: Path,
    label: str | None,
    columns: list[str] | None,
    form: Sequences,
    bad: BadRows,
    marks: Marks,
) -> Iterator[Record]:
    """The records of a file, of whatever form; `label` is that of all, if the file's name says."""
    if isinstance(marks, splits.SplitColumns):
        for split, line, values in marks.rows(Table(path), columns or [], bad):
            found = values[1] if values[1:] else None
            yield Record(line, (values[0] or "").strip(), found, None, split)
    elif ending(path) in FASTA or _looks_like_fasta(path, frozenset(form.alphabet)):
        yield from _fasta(path, label, form, bad, marks)
    else:
        yield from _three_lines(path, bad)


def _fasta(
    path: Path, label: str | None, form: Sequences, bad: BadRows, used: set[str] | None
) -> Iterator[Record]:
    """The records of a FASTA file. Either all headers name their split, or none does."""
    named: bool | None = None
    for line, header, sequence in read_fasta(path, bad):
        name, *fields = header.split() or [""]
        said = splits.of_header(fields)
        plain = [field for field in fields if field.partition("=")[0].lower() not in said]
        found = label or said.pop("target", None) or next(iter(plain[form.field - 1 :]), None)
        split = "test" if plain[1:2] == ["test"] and used is not None else ""
        if used is not None and named not in (None, bool(said)):
            bad(path, line, "some headers have a field SET= or VALIDATION=, and some have none")
            continue
        named = bool(said)
        if used is not None and said:
            try:
                split = splits.of_record(said)
            except ValueError as error:
                bad(path, line, str(error))
                continue
            used |= {key.upper() for key in said}
        yield Record(line, sequence, found, name or None, split)


def _looks_like_fasta(path: Path, letters: frozenset[str]) -> bool:
    """Whether the third line is of a sequence or a header; else it is a label (three lines)."""
    lines = (line.strip() for _, line in read_lines(path, BadRows(skip=True)) if line.strip())
    first, _, third = (*islice(lines, 3), "", "", "")[:3]
    if not first.startswith(">"):
        return False
    return (
        not third
        or third.startswith(">")
        or (len(first.split()) > 1 and set(third.upper()) <= letters)
    )


def _three_lines(path: Path, bad: BadRows) -> Iterator[Record]:
    """Records of three lines; blank lines do not count, and a line `>...` begins a record."""
    held: list[tuple[int, str]] = []
    for at, line in read_lines(path, bad):
        if held and (len(held) == 3 or line.startswith(">")):
            yield from _record(path, held, bad)
            held = []
        if line.strip():
            held.append((at, line.strip()))
    if held:
        yield from _record(path, held, bad)


def _record(path: Path, lines: list[tuple[int, str]], bad: BadRows) -> Iterator[Record]:
    if len(lines) == 3:
        yield Record(lines[2][0], lines[1][1], lines[2][1])
    else:
        bad(path, lines[0][0], "the record has not three lines: identifier, sequence, label")
