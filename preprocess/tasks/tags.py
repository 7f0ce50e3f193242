"""Labels of words and of amino acids, from the two formats in which they are published.

`task conll` reads the format of CoNLL's shared tasks, and CoNLL-U: one word per line with its label
in another column, and a blank line between sentences. Other columns are ignored.

`task protein/secondary` and `protein/conservation` read FLIP's directories (Dallago et al. 2021).
sequences.fasta holds the proteins. sampled.fasta holds a letter or digit for each amino acid, and
the split in each header (`SET=train VALIDATION=False`). mask.fasta, which may be missing, has a 0
for every amino acid that was not resolved. Labels of unresolved amino acids are ignored.

A row is a sentence or a protein. The label of a word or letter stands at its first token.
"""

from __future__ import annotations

import argparse
import re
import string
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from xformer.data import vocabularies
from xformer.data.arguments import whole_number
from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.store import ENTITY_LABEL, NO_LABEL

from ..bad import BadRows
from ..binarize import check_files, read_lines
from ..corpora.fasta import FASTA_LETTERS, read_fasta
from . import splits
from .protein import LETTERS
from .sequences import sequence_fault
from .source import TAG_METRICS, Row, TaskSource, add_labels, given_labels
from .split_files import input_files

ABOUTS = {
    "conll": "CoNLL's format: a word and its label on each line, blank lines between sentences.",
    "protein/secondary": "FLIP's secondary structure: helix, strand or neither, per amino acid.",
    "protein/conservation": "FLIP's conservation: how conserved each amino acid is, in 9 classes.",
}
ENDINGS = (".conll", ".conllu", ".bio", ".iob", ".tsv", ".txt")
DOCUMENT = "-DOCSTART-"  # CoNLL 2003 puts this word between documents
# the first column of CoNLL-U's extra lines, which repeat several words as one (3-4) or add a word
# that the text leaves out (3.1)
EXTRA_LINE = re.compile(r"\d+[-.]\d+")
# what a header calls the column of the words or of the labels
HEADER = re.compile(r"(word|token|form|text|tag|label|pos|upos|ner|entity|class)(s|_?tags?)?", re.I)
MOSTLY = 0.9  # a larger share of labels O, B-X and I-X makes the others doubtful


# ------------------------------------------------------------------------------- CoNLL's format


class ConllColumns(NamedTuple):
    """How the lines of a file are split into columns."""

    tabs: bool  # at tabs; else at any white space
    width: int
    word: int  # the column of the word, from 0
    label: int | None  # the column of the label; None if there is none
    comments: bool = False  # lines that begin with "# " before a sentence are comments

    def split(self, line: str) -> list[str]:
        """The columns of a line."""
        return line.split("\t") if self.tabs else line.split()

    def is_comment(self, line: str, begins: bool) -> bool:
        """Whether a line is a comment: one of CoNLL-U's, or, in a file whose first line is one, a
        line that begins with "# " before the first word of a sentence (if `begins`)."""
        if self.tabs:
            return line.startswith("#") and "\t" not in line
        return self.comments and begins and line.split()[0] == "#"


def add_conll_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task conll`."""
    add = parser.add_argument
    add(
        "--word",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="The column of the words, counted from 1; in CoNLL-U it is 2 (default: %(default)s).",
    )
    add(
        "--label",
        type=whole_number(1),
        metavar="N",
        help="The column of the labels, counted from 1; in CoNLL-U it is 4 or 5 (default: the last "
        "column of the training file). A test file may lack it.",
    )
    add_labels(parser)
    add(
        "--metric",
        choices=TAG_METRICS,
        help="The metric by which training selects the best checkpoint, unless train.metric names "
        "another (default: entity_f1 if the labels mark entities, as O, B-X and I-X do, else "
        "accuracy).",
    )


def read_conll(arguments: argparse.Namespace) -> TaskSource:
    """Sentences with a label per word. Raises BadInput if a file lacks a column."""
    files = input_files(arguments, ENDINGS)
    splits.refuse_columns(arguments.split_column, next(iter(files.values()))[0])
    split_files = [(split, path) for split, paths in files.items() for path in paths]
    columns: dict[Path, ConllColumns] = {}
    label: int | None = arguments.label
    # training comes first: the number of its last column decides which column is the label
    for split, path in split_files:
        columns[path] = columns_of(path, split, arguments.word, label)
        label = label or columns[path].width
    bad = BadRows(arguments.skip_bad)
    doubted = set[Path]()

    def rows() -> Iterator[Row]:  # called more than once
        for split, path in split_files:
            read = sentences(path, columns[path], bad)
            for line, words, labels in read if path in doubted else _doubted(path, read):
                yield Row(split, (" ".join(words),), _joined(labels), path, line)
            doubted.add(path)

    return TaskSource(
        rows=rows,
        files=list(columns),
        kind="tag",
        metric=arguments.metric,
        columns={"text": str(arguments.word), "text_b": None, "label": str(label)},
        bad=bad,
        splits=[(split, paths[0]) for split, paths in files.items()],
        labels=given_labels(arguments.labels),
    )


def _doubted(
    path: Path, read: Iterator[tuple[int, list[str], list[str]]]
) -> Iterator[tuple[int, list[str], list[str]]]:
    """The same sentences. At the end, warnings name lines that may not be words: a header,
    comments, and labels of another form than the rest."""
    labels: Counter[str] = Counter()
    odd: dict[str, int] = {}  # labels that do not mark entities, with their first sentence
    header, comments = "", []
    for line, words, tags in read:
        if not labels and all(map(HEADER.fullmatch, (words[0], tags[0]))):
            header = f"{words[0]} {tags[0]}"
        if words[0].startswith("#"):
            comments.append(line)
        for tag in {tag for tag in tags if not ENTITY_LABEL.fullmatch(tag)}:
            odd.setdefault(tag, line)
        labels.update(tags)
        yield line, words, tags
    notes = []
    if header:
        notes.append(f"its first line, {header!r}, is read as a word; delete it if it is a header")
    if len(comments) > 1:
        notes.append(
            f"{len(comments):,} sentences, such as the one at line {comments[0]}, begin with #; "
            "delete such lines if they are comments"
        )
    if 0 < sum(labels[tag] for tag in odd) < (1 - MOSTLY) * labels.total():
        tag, line = next(iter(odd.items()))
        notes.append(
            f"{many(len(odd), 'label')}, such as {tag!r} in the sentence at line {line}, "
            f"{'is' if len(odd) == 1 else 'are'} not O, B-X or I-X, so entities cannot be scored"
        )
    for note in notes:
        say(f"warning: {path}: {note}", error=True)


def _joined(labels: list[str]) -> str | None:
    """The labels of a row as one text; None if none of its words has a label."""
    return None if set(labels) <= {NO_LABEL} else " ".join(labels)


def columns_of(path: Path, split: str, word: int, label: int | None) -> ConllColumns:
    """The columns of a file, from its first line with a word.

    `word` and `label` are numbers from 1. Without `label`, the last column holds the labels. Raises
    BadInput if the file lacks one of them.
    """
    lines = (line for _, line in read_lines(path, BadRows(skip=True)) if line.strip())
    top = next(lines, "")
    every = chain([top], lines)
    first = next((line for line in every if "\t" in line or not line.startswith("#")), "")
    tabs = "\t" in first
    # a line of another width, or with "=", is not a word with its label
    is_word = "=" not in top and len(top.split()) == len(first.split())
    comments = not tabs and top.split()[:1] == ["#"] and not is_word
    if comments:
        say(f"note: {path}: lines that begin with '# ' before a sentence are comments", error=True)
    columns = ConllColumns(tabs, 0, word - 1, None, comments)
    width = len(columns.split(first))
    label = label or max(width, 2)
    labelled = label <= width and label != word
    if word > width or not (labelled or split == "test"):
        for_words = f"{word} for the words; see --word"
        for_labels = f"{label} for the labels (the words are in column {word}); see --label"
        raise BadInput(
            f"the first line of {path} has {many(width, 'column')}; there is no column "
            f"{for_words if word > width else for_labels}"
        )
    return columns._replace(width=width, label=label - 1 if labelled else None)


def sentences(
    path: Path, columns: ConllColumns, bad: BadRows
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (line of its first word, words, labels) of every sentence.

    In a file without labels, every label is NO_LABEL. A sentence with a line that cannot be read
    goes to `bad`. Lines with -DOCSTART- between documents are left out.
    """
    for block in _blocks(path, columns, bad):
        faults = ((at, _fault(fields, columns)) for at, fields in block)
        fault = next(((at, reason) for at, reason in faults if reason), None)
        if fault:
            bad(path, *fault)
            continue
        words = [fields[columns.word].strip() for _, fields in block]
        label = columns.label
        labels = [NO_LABEL if label is None else fields[label].strip() for _, fields in block]
        if words != [DOCUMENT]:
            yield block[0][0], words, labels


def _blocks(
    path: Path, columns: ConllColumns, bad: BadRows
) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield the words between two blank lines, each as (line number, columns). A sentence is left
    out if one of its lines is bad."""
    block: list[tuple[int, list[str]]] = []
    last, whole = 0, True
    for at, line in read_lines(path, bad):
        whole &= at == last + 1  # no line number is missing
        last = at
        if line.strip():
            fields = columns.split(line)
            is_extra = columns.word > 0 and EXTRA_LINE.fullmatch(fields[0])
            if not is_extra and not columns.is_comment(line, not block):
                block.append((at, fields))
        else:
            if block and whole:
                yield block
            block, whole = [], True
    if block and whole:
        yield block


def _fault(fields: list[str], columns: ConllColumns) -> str:
    """Why a line cannot be used; "" if it can."""
    if len(fields) != columns.width:
        count = many(len(fields), "column")
        return f"{count} instead of the {columns.width} of the file's first line"
    for what, column in (("word", columns.word), ("label", columns.label)):
        if column is not None and len(fields[column].split()) != 1:
            return f"the {what} {fields[column]!r} is empty or holds white space"
    return ""


# ------------------------------------------------------------------------------ FLIP's directories


def read_flip(arguments: argparse.Namespace) -> TaskSource:
    """Proteins with a label per amino acid. Raises BadInput if a file is missing."""
    sequences, sampled, mask = _flip_files(arguments)
    files = [sequences, sampled, *([mask] if mask.exists() else [])]
    check_files(files)
    splits.refuse_columns(arguments.split_column, sampled)
    draw, used = arguments.split_column == splits.NONE, set[str]()
    bad = BadRows(arguments.skip_bad)

    def rows() -> Iterator[Row]:
        proteins = {name: text for _, name, _, text in _records(sequences, bad)}
        resolved = {name: text for _, name, _, text in _records(mask, bad)} if mask in files else {}
        for line, name, fields, labels in _records(sampled, bad):
            protein = proteins.get(name, "")
            marks = resolved.get(name, "") if mask in files else "1" * len(labels)
            header = splits.of_header(fields)
            try:
                split = "" if draw else splits.of_record(header)
            except ValueError as error:
                bad(sampled, line, f"{name}: {error}")
                continue
            if not draw and "set" not in header:
                bad(sampled, line, f"{name}: its header has neither SET=train nor SET=test")
                continue
            if reason := _protein_fault(name, protein, labels, marks):
                bad(sampled, line, reason)
                continue
            used.update(() if draw else map(str.upper, header))
            known = [
                NO_LABEL if mark == "0" else label
                for label, mark in zip(labels, marks, strict=True)
            ]
            yield Row(split, (" ".join(protein),), _joined(known), sampled, line, name)

    return TaskSource(
        rows=rows,
        files=files,
        kind="tag",
        metric="accuracy",
        columns={"text": "sequence", "text_b": None, "label": "label", "uppercase": True},
        bad=bad,
        tokenizer=vocabularies.symbols(LETTERS),
        split_columns=used,
    )


def _flip_files(arguments: argparse.Namespace) -> list[Path]:
    """Where FLIP's three files should be. Raises BadInput if --input does not name a directory."""
    if given := [name for name in ("train", "valid", "test") if getattr(arguments, name)]:
        raise BadInput(
            f"--{given[0]} cannot be used here: the files say which protein is in which split; "
            "give --input DIR"
        )
    source: Path | None = arguments.input
    if source is None or not source.is_dir():
        raise BadInput("give --input DIR with FLIP's sequences.fasta and sampled.fasta")
    folder = source / "splits" if (source / "splits").is_dir() else source
    return [folder / f"{name}.fasta" for name in ("sequences", "sampled", "mask")]


def _records(path: Path, bad: BadRows) -> Iterator[tuple[int, str, list[str], str]]:
    """(line, name, the other fields of the header, text) of every FASTA record. Its text may hold
    digits."""
    for line, header, text in read_fasta(path, bad, letters=FASTA_LETTERS + string.digits):
        name, *fields = header.split() or [""]
        yield line, name, fields, text


def _protein_fault(name: str, protein: str, labels: str, marks: str) -> str:
    """Why a protein cannot be used; "" if it can."""
    if not protein:
        return f"{name} is not in sequences.fasta"
    if fault := sequence_fault(protein, LETTERS):
        return f"{name}: {fault}"
    if not len(protein) == len(labels) == len(marks):
        marked = f", {len(marks)} marks in mask.fasta" if len(marks) != len(labels) else ""
        counts = f"{len(protein)} amino acids, {len(labels)} labels{marked}"
        return f"{name} has {counts}; the numbers must be equal"
    return ""
