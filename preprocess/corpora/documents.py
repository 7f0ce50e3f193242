"""Raw text files -> documents, in memory that does not grow with the input.

In plain text, blank lines separate documents; with `--lines`, every line is a document. In other
formats, the format says what a document is.

A long document comes in segments. They are cut where the tokenizers cut anyway: before a single
space, at a line end of plain text, between a punctuation mark and a Chinese or Japanese letter, or
else before other white space. So the ids of the segments are the ids of the whole document. There
are two exceptions. A stretch of SEGMENT characters without such a place is cut anywhere. Unigram
marks the start of a text, so it adds a mark if the cut is not at a space.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from xformer.data.errors import BadInput

from ..bad import STRICT, BadRows
from ..binarize import not_utf8, open_binary
from ..tasks.tables import RowTable
from ..words import EAST_ASIAN, MARKS
from . import inputs
from .fasta import read_fasta
from .java import read_java
from .jsonl import read_json_texts

READ = 2**16  # bytes read at once
LINE = 1000  # characters; old files that end lines in a carriage return have one more often
SEGMENT = 2**15  # characters of a document encoded as one text

# the last place before the end where a single space stands between words
_LAST_SPACE = re.compile(r".*\S(?= \S)", re.DOTALL)
_LAST_MARK = re.compile(rf".*[{MARKS}](?=[{EAST_ASIAN}])", re.DOTALL)
_LAST_WHITE = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)

Segments = Iterator[tuple[str, bool]]  # (segment, does it end its document?)


@dataclass(frozen=True)
class TextOptions:
    """How files are divided into documents.

    With `by_line` each line of plain text is a document. Lines of text that match the expression
    `skip` are left out. `format` is the format of all files (default: given by each file's ending).
    `json_field` is the field of a JSON object, or the column of a table, that holds the text. `bad`
    receives the rows that cannot be read.
    """

    by_line: bool = False
    skip: re.Pattern[str] | None = None
    format: str | None = None
    json_field: str = "text"
    bad: BadRows = STRICT


def read_documents(
    paths: Iterable[Path], options: TextOptions, advance: Callable[[int], None]
) -> Segments:
    """Yield (segment, does it end its document?) of several files. A document ends with its file.

    `advance` is called with the size of each block read from the disk, or, if the format needs the
    whole file at once, with the size of each document. Raises BadInput naming file and line for
    what cannot be read.
    """
    for path in paths:
        form = options.format or inputs.format_of(path)
        if form == "text":
            yield from plain_documents(read_pieces(path, advance, options.bad), options)
            continue
        if form == "jsonl":
            texts = read_json_texts(path, options.json_field, options.bad, advance)
        elif form == "table":
            texts = _column(path, options.json_field, options.bad, advance)
        elif form == "java":
            texts = read_java(path, options.bad, advance)
        else:
            texts = (sequence for _, _, sequence in read_fasta(path, options.bad, advance))
        for text in texts:
            yield from whole_document(text, options)


def files_of_part(paths: Sequence[Path], part: tuple[int, int]) -> list[tuple[Path, int, int]]:
    """The files in which documents of a part may begin, each as (path, begin, end). `begin` is the
    number of bytes of all files before it, and `end` is `begin` plus its own size."""
    number, parts = part
    begins = [0, *accumulate(path.stat().st_size for path in paths)]
    return [
        (path, begin, end)
        for path, begin, end in zip(paths, begins, begins[1:], strict=False)
        if _part_at(begin, begins[-1], parts) <= number <= _part_at(end, begins[-1], parts)
    ]


def _part_at(place: int, total: int, parts: int) -> int:
    """The number of the part, from 1, in which byte `place` of `total` lies."""
    return max(1, -(-place * parts // total))


def read_part(
    paths: Sequence[Path],
    part: tuple[int, int],
    options: TextOptions,
    advance: Callable[[int], None],
) -> Segments:
    """Yield, like `read_documents`, the documents of one part of the files. The documents of all
    parts, one part after the other, are those of the files in the same order.

    The bytes of all files are divided evenly, and a document belongs to the part in which it
    begins. Its beginning is the number of bytes read from disk when the reader yields it. Files are
    read 64 KiB at a time, so parts may differ by that much from equal sizes. A file that several
    parts share is read from its beginning for each of them, but each yields only its own
    documents. A file of one JSON object is not divided.
    """
    (number, parts), total = part, sum(path.stat().st_size for path in paths)
    place = 0  # the number of bytes of all files before what is read next

    def count(size: int) -> None:
        nonlocal place
        place += size
        advance(size)

    for path, place, end in files_of_part(paths, part):
        mine, begins = False, True
        for text, ends in read_documents([path], options, count):
            if begins:
                at = _part_at(min(place, end), total, parts)
                if at > number:
                    return  # later files begin in later parts
                mine = at == number
            if mine:
                yield text, ends
            begins = ends


def _column(path: Path, name: str, bad: BadRows, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the texts in a column of a table; empty ones are left out."""
    table = RowTable(path)
    if name not in table.columns:
        others = "name one with --field, or give --format text to read all of it"
        raise BadInput(f"{table.missing(name)}; {others}")
    for _, (text,) in table.rows([name], bad, advance=advance):
        if text:
            yield text


def read_pieces(
    path: Path, advance: Callable[[int], None], bad: BadRows
) -> Iterator[tuple[str, bool]]:
    """Yield (piece, does it end its line?) of a text file. Lines over SEGMENT come in pieces.

    `advance` is called with the size of each block read from the disk. A line that is not UTF-8
    goes to `bad`, or raises BadInput naming file and line if `bad` skips nothing. If the line is
    long, only the piece that is not UTF-8 is left out.
    """
    if not bad.skip:
        yield from _pieces(path, advance, "strict")
        return
    number, inside = 1, False
    # Bytes that are not UTF-8 become lone surrogates, which valid UTF-8 never gives.
    for piece, ends_line in _pieces(path, advance, "surrogateescape"):
        try:
            piece.encode(errors="surrogateescape").decode()
        except UnicodeDecodeError as error:
            bad(path, number, not_utf8(error))
            if inside and ends_line:
                yield "", True
        else:
            yield piece, ends_line
        inside = not ends_line
        number += ends_line


def _pieces(path: Path, advance: Callable[[int], None], errors: str) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    rest, number, size, returns = "", 1, 0, 0
    with open_binary(path, advance) as file:
        while True:
            data = file.read(READ)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = number + error.object[: error.start].count(b"\n")
                raise BadInput(f"{path}:{line}: {not_utf8(error)}") from None
            number += text.count("\n")
            size, returns = size + len(text), returns + text.count("\r")
            *lines, rest = (rest + text).split("\n")
            for whole in lines:
                *heads, last = _cut(whole)
                yield from ((head, False) for head in heads)
                yield last.removesuffix("\r"), True
            *heads, rest = _cut(rest)
            yield from ((head, False) for head in heads)
            if not data:
                break
    if number == 1 and returns > max(1, size / LINE):
        raise BadInput(f"{path}: its lines end in a carriage return alone; end them in LF or CRLF")
    if rest:
        yield rest.removesuffix("\r"), True


def _cut(text: str) -> Iterator[str]:
    """Yield one or more parts of at most SEGMENT characters. All but the last part end before white
    space or after a punctuation mark, if there is such a place."""
    start = 0
    while len(text) - start > SEGMENT:
        stop = start + SEGMENT
        places = (last.match(text, start, stop) for last in (_LAST_SPACE, _LAST_MARK, _LAST_WHITE))
        end = next((place.end() for place in places if place), stop)
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def plain_documents(pieces: Iterable[tuple[str, bool]], options: TextOptions) -> Segments:
    """Yield (segment, does it end its document?) from the pieces of one plain text file."""
    held: list[str] = []
    size, started, new_line, skipping = 0, False, True, False
    for piece, ends_line in pieces:
        if new_line:
            skipping = options.skip is not None and options.skip.search(piece) is not None
        if skipping:
            pass
        elif options.by_line:
            yield piece, ends_line
        elif new_line and ends_line and not piece.strip():
            if started:
                yield "".join(held), True
            held, size, started = [], 0, False
        else:
            held.append("\n" + piece if new_line and started else piece)
            size, started = size + len(held[-1]), True
            # White space belongs to the word after it, so a segment should not end in white space.
            if size > SEGMENT and (not piece[-1:].isspace() or size > 4 * SEGMENT):
                yield "".join(held), False
                held, size = [], 0
        new_line = ends_line
    if started:
        yield "".join(held), True


def whole_document(text: str, options: TextOptions) -> Segments:
    """Yield (segment, does it end the document?) of a document that is in memory as a whole."""
    if options.skip is not None:
        text = "\n".join(line for line in text.split("\n") if not options.skip.search(line))
    *heads, last = _cut(text)
    yield from ((head, False) for head in heads)
    yield last, True
