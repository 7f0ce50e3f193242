"""Labels of words and letters, from the two forms they are published in.

`task conll`: a word and its label a line, in columns, a blank line between sentences (the shared
tasks of CoNLL; also CoNLL-U). The other columns are passed over.
`task protein/secondary` and `protein/conservation`: FLIP's directories (Dallago et al. 2021), whose
sequences.fasta holds the proteins, sampled.fasta a letter or digit for each amino acid, with the
split in its header (`SET=train VALIDATION=False`), and mask.fasta, if it is there, 0 where the
label is of an unresolved amino acid and so no label at all.

A row is a sentence or a protein; labels stand at the first token of every word or letter.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xformer.data import vocabularies
from xformer.data.errors import BadInput
from xformer.data.tags import NO_LABEL

from ..arguments import whole_number as number
from ..bad import BadRows
from ..binarize import check_files, read_lines
from . import splits
from .labelled import TAG_METRICS, Row, Task, check_metric, input_files
from .protein import LETTERS

ABOUTS = {
    "conll": "Any file of the CoNLL form: a word and its label a line, blank lines between.",
    "protein/secondary": "FLIP's secondary structure: a helix, a strand or neither, by amino acid.",
    "protein/conservation": "FLIP's conservation: how conserved every amino acid is, nine classes.",
}
ENDINGS = (".conll", ".conllu", ".bio", ".iob", ".tsv", ".txt")
DOCUMENT = "-DOCSTART-"  # CoNLL 2003 puts this word between documents
MULTIWORD = re.compile(r"\d+[-.]\d+")  # CoNLL-U: a line beside the words, not one of them


# ------------------------------------------------------------------------------- CoNLL's form


class Columns(NamedTuple):
    """How a file's lines fall into columns: at tabs or at any white space, how many there are, and
    which hold the word and the label (None: there is none)."""

    tabs: bool
    width: int
    word: int
    label: int | None

    def split(self, line: str) -> list[str]:
        return line.split("\t") if self.tabs else line.split()

    def comment(self, line: str) -> bool:
        return self.tabs and line.startswith("#") and "\t" not in line


def add_conll_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task conll`."""
    add = parser.add_argument
    add(
        "--word",
        type=number(1),
        default=1,
        metavar="N",
        help="The column of the words, counted from 1 (default: %(default)s; CoNLL-U: 2).",
    )
    add(
        "--label",
        type=number(1),
        metavar="N",
        help="The column of the labels (default: the last; "
        "CoNLL-U: 4 or 5). A test file may lack it.",
    )
    add(
        "--metric",
        choices=TAG_METRICS,
        help="What selection maximises (default: entity_f1 where "
        "the labels are O, B-X and I-X, else accuracy).",
    )


def read_conll(arguments: argparse.Namespace) -> Task:
    """The task of sentences with a label a word. Raises BadInput naming file and line."""
    files = input_files(arguments, ENDINGS)
    splits.refuse_columns(arguments.split_column, next(iter(files.values()))[0])
    places = [(split, path) for split, paths in files.items() for path in paths]
    columns: dict[Path, Columns] = {}
    label: int | None = arguments.label
    for split, path in places:  # training first: its last column is the label's in all files
        columns[path] = columns_of(path, split, arguments.word, label)
        label = label or columns[path].width
    bad = BadRows(arguments.skip_bad)

    def rows() -> Iterator[Row]:
        for split, path in places:
            for line, words, labels in sentences(path, columns[path], bad):
                named = None if set(labels) <= {NO_LABEL} else " ".join(labels)
                yield Row(split, (" ".join(words),), named, path, line)

    return Task(
        rows=rows,
        files=list(columns),
        kind="tag",
        metric=check_metric("tag", arguments.metric) if arguments.metric else None,
        columns={"text": str(arguments.word), "text_b": None, "label": str(label)},
        bad=bad,
        splits=[(split, paths[0]) for split, paths in files.items()],
    )


def columns_of(path: Path, split: str, word: int, label: int | None) -> Columns:
    """The form of a file, by its first line with a word; `label` None is the last column. Raises
    BadInput where a column lacks."""
    lines = (line for _, line in read_lines(path, BadRows(skip=True)) if line.strip())
    first = next((line for line in lines if "\t" in line or not line.startswith("#")), "")
    form = Columns("\t" in first, 0, word - 1, None)
    width = len(form.split(first))
    label = label or max(width, 2)
    labelled = label <= width and label != word
    if word > width or not (labelled or split == "test"):
        lacks, many = word if word > width else label, "s" * (width != 1)
        raise BadInput(
            f"{path} has {width} column{many}, by its first line; there is no column "
            f"{lacks} beside that of the words"
        )
    return form._replace(width=width, label=label - 1 if labelled else None)


def sentences(
    path: Path, columns: Columns, bad: BadRows
) -> Iterator[tuple[int, list[str], list[str]]]:
    """(line of its first word, words, labels) of every sentence; NO_LABEL where there is none. A
    sentence with a line that cannot be read goes to `bad`."""
    for block in _blocks(path, columns, bad):
        reasons = ((at, _wrong(fields, columns)) for at, fields in block)
        found = next(((at, reason) for at, reason in reasons if reason), None)
        words = [fields[columns.word] for _, fields in block if len(fields) > columns.word]
        if found:
            bad(path, *found)
        elif words != [DOCUMENT]:
            label = columns.label
            yield block[0][0], words, [NO_LABEL if label is None else f[label] for _, f in block]


def _blocks(path: Path, columns: Columns, bad: BadRows) -> Iterator[list[tuple[int, list[str]]]]:
    """The lines between blank ones, each with its number and cut into its columns."""
    block: list[tuple[int, list[str]]] = []
    for at, line in read_lines(path, bad):
        if line.strip():
            fields = columns.split(line)
            beside = columns.word > 0 and MULTIWORD.fullmatch(fields[0])
            if not beside and not columns.comment(line):
                block.append((at, fields))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _wrong(fields: list[str], columns: Columns) -> str:
    """Why a line cannot be used."""
    if len(fields) != columns.width:
        there = f"{len(fields)} column{'s' * (len(fields) != 1)}"
        return f"{there} instead of the {columns.width} of the file's first line"
    for what, place in (("word", columns.word), ("label", columns.label)):
        if place is not None and len(fields[place].split()) != 1:
            return f"the {what} {fields[place]!r} is empty, or holds white space"
    return ""


# ------------------------------------------------------------------------------ FLIP's directories


def add_flip_arguments(parser: argparse.ArgumentParser) -> None:
    """FLIP's tasks have no options beside those of every task."""


def read_flip(arguments: argparse.Namespace) -> Task:
    """The task of proteins with a label an amino acid. Raises BadInput for a missing file."""
    if given := [name for name in ("train", "valid", "test") if getattr(arguments, name)]:
        raise BadInput(
            f"--{given[0]} has no meaning here: the files say which protein is of which "
            "split; give --input DIR"
        )
    source: Path | None = arguments.input
    if source is None or not source.is_dir():
        raise BadInput("give --input DIR with FLIP's sequences.fasta and sampled.fasta")
    folder = source / "splits" if (source / "splits").is_dir() else source
    sequences, sampled, mask = (
        folder / f"{name}.fasta" for name in ("sequences", "sampled", "mask")
    )
    files = [sequences, sampled, *([mask] if mask.exists() else [])]
    check_files(files)
    splits.refuse_columns(arguments.split_column, sampled)
    drawn, used = arguments.split_column == splits.NONE, set[str]()
    bad = BadRows(arguments.skip_bad)

    def rows() -> Iterator[Row]:
        proteins, kept = (
            {name: text for _, name, _, text in _records(file, bad)} if file in files else None
            for file in (sequences, mask)
        )
        for line, name, fields, labels in _records(sampled, bad):
            protein = (proteins or {}).get(name, "")
            known = "1" * len(labels) if kept is None else kept.get(name, "")
            said = splits.of_header(fields)
            try:
                split = "" if drawn else splits.of_record(said)
            except ValueError as error:
                bad(sampled, line, f"{name}: {error}")
                continue
            if not drawn and "set" not in said:
                bad(sampled, line, f"{name}: its header says neither SET=train nor SET=test")
                continue
            if reason := _wrong_protein(name, protein, labels, known):
                bad(sampled, line, reason)
                continue
            used.update(() if drawn else map(str.upper, said))
            told = [NO_LABEL if k == "0" else label for label, k in zip(labels, known, strict=True)]
            named = None if set(told) <= {NO_LABEL} else " ".join(told)
            yield Row(split, (" ".join(protein),), named, sampled, line, name)

    return Task(
        rows=rows,
        files=files,
        kind="tag",
        metric="accuracy",
        columns={"text": "sequence", "text_b": None, "label": "label", "uppercase": True},
        bad=bad,
        tokenizer=vocabularies.symbols(LETTERS),
        split_columns=used,
    )


def _records(path: Path, bad: BadRows) -> Iterator[tuple[int, str, list[str], str]]:
    """(line, name, the rest of the header, text) of every record. Unlike the records of
    `preprocess.fasta` these may hold digits."""
    start, header, parts = 0, [""], list[str]()
    for at, line in read_lines(path, bad):
        if line.startswith(">"):
            if start:
                yield start, header[0], header[1:], "".join(parts)
            start, header, parts = at, line[1:].split() or [""], []
        elif start:
            parts += line.upper().split()
        elif line.strip():
            raise BadInput(f"{path}:{at}: text before the first header, a line `>name`")
    if start:
        yield start, header[0], header[1:], "".join(parts)


def _wrong_protein(name: str, protein: str, labels: str, known: str) -> str:
    """Why a protein cannot be used."""
    if not protein:
        return f"{name} is not in sequences.fasta"
    if wrong := sorted(set(protein) - set(LETTERS)):
        return f"{name}: letters other than {LETTERS}: {''.join(wrong)!r}"
    if not len(protein) == len(labels) == len(known):
        return (
            f"{name} has {len(protein)} amino acids, {len(labels)} labels and "
            f"{len(known)} marks in mask.fasta"
        )
    return ""
