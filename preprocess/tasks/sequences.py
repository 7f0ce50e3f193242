"""Labelled sequences of letters, DNA and proteins alike, from the formats of their data sets:

- FASTA. The second field of a header is the label (PLUS), and a third field `test` marks a test row
  (DeepLoc). Or the fields have names, as in `TARGET=1.5 SET=train VALIDATION=False` (FLIP).
- A directory with one FASTA file per class, named after it.
- Text with three lines per record: identifier, sequence, label (Hilbert-CNN).
- Delimited files, JSON lines (TAPE) and parquet with named columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from xformer.data import vocabularies
from xformer.data.arguments import whole_number
from xformer.data.display import say
from xformer.data.errors import BadInput

from ..bad import BadRows
from ..binarize import check_files, read_lines
from ..corpora.fasta import FASTA, read_fasta
from . import splits
from .source import Row, TaskSource, check_metric
from .split_files import find_splits, input_files, refuse_splits
from .tables import ENDINGS, RowTable, extension, stem
from .tsv import add_keys, group_of, keys_of

LOST = ""  # stands for a line of a record that could not be read
ORDINALS = ("first", "second", "third")
# what the columns of the sequence and of the label may be called, the first choice first
SEQUENCE = ("sequence", "seq", "seqs", "primary")
LABEL = ("label", "labels", "class", "score", "target")


@dataclass(frozen=True)
class Sequences:
    """What distinguishes one task on sequences from another."""

    about: str
    alphabet: str
    kind: str | None = None  # "class" or "score"; None: the user says which
    label: tuple[str, ...] = LABEL  # what the column of the label may be called
    longest: int | None = None  # longer sequences lose their middle
    clean: Callable[[str], str] = str  # from a label as the file writes it to a class
    without: str | None = None  # a class that the task leaves out
    field: int = 1  # the field of a FASTA header that holds the label; field 0 is the name


class Columns(NamedTuple):
    """The columns of a table: the sequence, the label (a test file may lack it), --id and
    --group."""

    sequence: str
    label: str | None
    id: str | None
    group: str | None

    @property
    def names(self) -> list[str]:
        """The columns to read."""
        return [name for name in self if name]


class Record(NamedTuple):
    """A sequence as a file writes it."""

    line: int
    sequence: str
    label: str | None
    id: str | None = None
    split: str = ""  # "" if the record is not marked
    group: str | None = None


def add_arguments(parser: argparse.ArgumentParser, form: Sequences) -> None:
    """The options of a task on sequences."""
    add = parser.add_argument
    add(
        "--sequence",
        metavar="COLUMN",
        help="The column of the sequence, in files with columns (default: the first of "
        f"{', '.join(SEQUENCE)} that exists).",
    )
    add(
        "--label",
        metavar="COLUMN",
        help="The column of the label or score, in files with columns (default: the first of "
        f"{', '.join(form.label)} that exists). In FASTA the label is the "
        f"{ORDINALS[form.field]} field of the header, or a field TARGET=.",
    )
    add_keys(parser)
    default = form.longest or "keep whole sequences"
    add(
        "--longest",
        type=whole_number(2),
        default=form.longest,
        metavar="N",
        help="The maximum length of a sequence. A longer one is cut to its first N/2 and its last "
        f"N/2 letters (default: {default}).",
    )
    if form.kind is None:
        add(
            "--kind",
            choices=("class", "score"),
            default="class",
            help="Whether the label names a class or is a number (default: %(default)s).",
        )


def read(arguments: argparse.Namespace, form: Sequences) -> TaskSource:
    """The sequences of --input, --train, --valid and --test. Raises BadInput naming the file, and
    the line if there is one."""
    classes = _classes(arguments)
    files = {"": list(classes)} if classes else input_files(arguments, (*ENDINGS, *FASTA))
    split_files = [(split, path) for split, paths in files.items() for path in paths]
    columns = {path: _columns(path, split, arguments, form) for split, path in split_files}
    _check_columns(columns, arguments)
    if fasta := [path for path in columns if extension(path) in FASTA and path not in classes]:
        _say_label(fasta[0], form)
    used = set[str]()
    marks = {
        path: _marks(path, split, arguments, columns[path], used) for split, path in split_files
    }
    bad, left_out = BadRows(arguments.skip_bad), BadRows(skip=True)

    def rows() -> Iterator[Row]:
        for split, path in split_files:
            for record in sequence_records(
                path, classes.get(path), columns[path], form, bad, marks[path]
            ):
                sequence = record.sequence.upper()
                label = form.clean((record.label or "").strip())
                if fault := sequence_fault(sequence, form.alphabet):
                    bad(path, record.line, fault)
                elif label and label == form.without:
                    left_out(path, record.line, f"{label} is not a class of this task")
                else:
                    yield Row(
                        split or record.split,
                        (both_ends(sequence, arguments.longest),),
                        label or None,
                        path,
                        record.line,
                        record.id,
                        key=record.group,
                    )

    kind = form.kind or arguments.kind
    first = next(iter(columns.values()))
    return TaskSource(
        rows=rows,
        files=list(columns),
        kind=kind,
        metric=check_metric(kind, None),
        columns={
            "text": first.sequence if first else "sequence",
            "text_b": None,
            "label": (first and first.label) or "label",
            "uppercase": True,
            "longest": arguments.longest,
        },
        bad=bad,
        splits=[(split, paths[0]) for split, paths in files.items()],
        left_out=left_out,
        tokenizer=vocabularies.symbols(form.alphabet),
        split_columns=used,
    )


def sequence_fault(sequence: str, letters: str) -> str:
    """Why a sequence of these letters cannot be used; "" if it can."""
    if wrong := sorted(set(sequence) - set(letters)):
        return f"letters other than {letters}: {''.join(wrong)!r}"
    return "" if sequence else "the sequence is empty"


def both_ends(sequence: str, longest: int | None) -> str:
    """The sequence, without its middle if it has more than `longest` letters."""
    if not longest or len(sequence) <= longest:
        return sequence
    head = -(-longest // 2)
    return sequence[:head] + sequence[head - longest :]


def _classes(arguments: argparse.Namespace) -> dict[Path, str]:
    """file -> class, if --input is a directory with one FASTA file per class; else empty."""
    source: Path | None = arguments.input
    if source is None or not source.is_dir() or arguments.train:
        return {}
    fasta = [
        path
        for path in sorted(source.iterdir())
        if extension(path) in FASTA and not path.name.startswith(".")
    ]
    files = find_splits(source, (*ENDINGS, *FASTA))
    if "train" in files:
        used = [path for paths in files.values() for path in paths]
        if others := [path.name for path in fasta if path not in used]:
            names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            say(
                f"note: {source} holds {files['train'][0].name}, so its files are splits, not "
                f"classes; not read: {names}",
                error=True,
            )
        return {}
    if fasta and (arguments.valid or arguments.test):
        raise BadInput(
            f"{source} holds one FASTA file per class; it cannot be combined with --valid or --test"
        )
    check_files(fasta)
    refuse_splits(source, map(stem, fasta))
    return {path: stem(path) for path in fasta}


def _columns(
    path: Path, split: str, arguments: argparse.Namespace, form: Sequences
) -> Columns | None:
    """The columns of a file. None if it is not a table.

    A test file may lack the label.
    """
    if extension(path) in (*FASTA, ".txt"):
        return None
    table = RowTable(path)

    def column(option: str, chosen: str | None, names: tuple[str, ...]) -> str | None:
        name = table.find([chosen] if chosen else names)
        if name is not None or (option == "--label" and split == "test"):
            return name
        if chosen:
            raise table.missing(chosen)
        raise BadInput(f"{path} has the columns {table.shown()}; give {option} COLUMN")

    sequence = column("--sequence", arguments.sequence, SEQUENCE)
    label = column("--label", arguments.label, form.label)
    assert sequence is not None
    for name in keys_of(arguments):
        if name not in table.columns:
            raise table.missing(name)
    return Columns(sequence, label, arguments.id, arguments.group)


def _check_columns(columns: dict[Path, Columns | None], arguments: argparse.Namespace) -> None:
    """Raise BadInput if an option names a column, but no file has columns. With --group every file
    needs them: rows of an unknown group could be in two splits, and no note would say so."""
    for option in ("sequence", "label", "id", "group"):
        enough = all if option == "group" else any
        if getattr(arguments, option) is not None and not enough(columns.values()):
            path = next(path for path in columns if not columns[path])
            raise BadInput(f"--{option} names a column, but {path} has none; leave it out")


def _say_label(path: Path, form: Sequences) -> None:
    """Say which word of a FASTA header becomes the label. A named field (TARGET=) needs no note."""
    fields = first_line(path).removeprefix(">").split()
    if len(fields) > form.field and not splits.of_header(fields[1:]):
        ordinal, label = ORDINALS[form.field], fields[form.field]
        say(
            f"note: the label is the {ordinal} field of a header, {label!r} in the first one of "
            f"{path}",
            error=True,
        )


# What names the splits of a file's rows: columns of a table; fields of FASTA headers (a set that
# collects the fields that were read); or nothing (None).
Marks = splits.SplitColumns | set[str] | None


def _marks(
    path: Path, split: str, arguments: argparse.Namespace, columns: Columns | None, used: set[str]
) -> Marks:
    """What names the splits of a file's rows.

    `split` is the split that the whole file belongs to, "" if the user named none. `used` collects
    the columns or fields that are read.
    """
    split_column = arguments.split_column
    if columns is not None:
        return splits.find(RowTable(path), split_column, columns.names, split, used)
    splits.refuse_columns(split_column, path)
    if split and (header := splits.of_header(first_line(path).split()[1:])):
        splits.note_unread(path, f"field {next(iter(header)).upper()}= in the headers", split)
    return None if split or split_column == splits.NONE else used


def first_line(path: Path) -> str:
    """The first line of a file that is not blank."""
    lines = (line.strip() for _, line in read_lines(path, BadRows(skip=True)))
    return next(filter(None, lines), "")


def sequence_records(
    path: Path,
    label: str | None,
    columns: Columns | None,
    form: Sequences,
    bad: BadRows,
    marks: Marks,
) -> Iterator[Record]:
    """Yield the records of a file of any format.

    `label` is the label of all records, if the file's name gives it.
    """
    if isinstance(marks, splits.SplitColumns):
        assert columns is not None
        for split, line, values in marks.rows(RowTable(path), columns.names, bad):
            row: dict[str | None, str | None] = dict(zip(columns.names, values, strict=True))
            sequence = (row[columns.sequence] or "").strip()
            id_ = (row[columns.id] or "") if columns.id else None
            group = group_of(row.get(columns.group))
            yield Record(line, sequence, row.get(columns.label), id_, split, group)
    elif extension(path) in FASTA or _looks_like_fasta(path, frozenset(form.alphabet)):
        yield from _fasta(path, label, form, bad, marks)
    else:
        yield from _three_lines(path, bad)


def _fasta(
    path: Path, label: str | None, form: Sequences, bad: BadRows, used: set[str] | None
) -> Iterator[Record]:
    """Yield the records of a FASTA file. Either all headers name their split, or none does.

    Without `used`, the splits in the headers are not read.
    """
    headers_name_splits: bool | None = None  # not known before the first header
    for line, header, sequence in read_fasta(path, bad):
        name, *fields = header.split() or [""]
        keyed = splits.of_header(fields)
        plain = [field for field in fields if field.partition("=")[0].lower() not in keyed]
        own_label = keyed.pop("target", None) or next(iter(plain[form.field - 1 :]), None)
        split = "test" if plain[1:2] == ["test"] and used is not None else ""
        if used is not None and headers_name_splits not in (None, bool(keyed)):
            bad(path, line, "some headers have a field SET= or VALIDATION=, and some have none")
            continue
        headers_name_splits = bool(keyed)
        if used is not None and keyed:
            try:
                split = splits.of_record(keyed)
            except ValueError as error:
                bad(path, line, str(error))
                continue
            used |= {key.upper() for key in keyed}
        yield Record(line, sequence, label or own_label, name or None, split)


def _looks_like_fasta(path: Path, letters: frozenset[str]) -> bool:
    """Whether a file is FASTA, and not text with three lines per record.

    In FASTA, the third line is a header or part of a sequence. In the other format it is a label.
    """
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
    """Records of three lines. Blank lines are ignored, and a line `>...` begins a new record. A
    record is left out if one of its lines is bad."""
    block: list[tuple[int, str]] = []
    last = 0
    for at, line in read_lines(path, bad):
        block += [(lost, LOST) for lost in range(last + 1, at)]  # lines that went to `bad`
        last = at
        while len(block) >= 3 or (block and line.startswith(">")):
            yield from _record(path, block[:3], bad)
            block = block[3:]
        if line.strip():
            block.append((at, line.strip()))
    if block:
        yield from _record(path, block, bad)


def _record(path: Path, lines: list[tuple[int, str]], bad: BadRows) -> Iterator[Record]:
    """Yield the record that three lines (number, text) hold.

    If there are not three lines, report them to `bad` and yield nothing.
    """
    if LOST in (text for _, text in lines):
        return
    if len(lines) == 3:
        yield Record(lines[2][0], lines[1][1], lines[2][1])
    else:
        reason = "the record does not have three lines: identifier, sequence, label"
        bad(path, lines[0][0], reason)
