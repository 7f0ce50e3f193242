"""Raw text -> documents -> rows of a store, in memory that does not grow with the input.

A document is what stands between blank lines, or one line with `--lines`; in other formats than
plain text it is what the format says. Long documents are encoded in segments, cut where the
tokenizers cut anyway (before a single space, a line end, or a Chinese or Japanese letter behind
punctuation), so that the ids are those of the whole document. Where SEGMENT characters hold no such
place they are cut anywhere; and unigram, which marks the start of a text, gets a mark more at a cut
without a space.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.data import tokenizers
from xformer.data.display import Progress
from xformer.data.errors import BadInput
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, check_output, expression, number, origin, summarise
from ..bad import BadRows
from ..binarize import BATCH, RowCutter, not_utf8, open_binary, sources
from ..words import EAST_ASIAN, MARKS
from ..workers import Encoders
from . import inputs
from .fasta import read_fasta
from .java import read_java
from .jsonl import read_json_texts

READ = 2**20  # bytes read at once
SEGMENT = 2**15  # characters of a document encoded as one text

# the last place before the end where a single space stands between words
_LAST_SPACE = re.compile(r".*\S(?= \S)", re.DOTALL)
_LAST_MARK = re.compile(rf".*[{MARKS}](?=[{EAST_ASIAN}])", re.DOTALL)


@dataclass(frozen=True)
class TextOptions:
    """How files fall into documents: plain text by blank lines or `by_line`; without lines in
    which the expression `skip` is found; all files in one `format` (default: by their endings);
    JSON objects' text in `json_field`; and what becomes of bad rows."""

    by_line: bool = False
    skip: re.Pattern[str] | None = None
    format: str | None = None
    json_field: str = "text"
    bad: BadRows = field(default_factory=lambda: BadRows(skip=False))


def read_pieces(
    path: Path, read: Callable[[int], None], bad: BadRows | None = None
) -> Iterator[tuple[str, bool]]:
    """(piece, does it end its line?) in order; lines longer than SEGMENT come in pieces.

    `read` is told of every block's bytes on the disk. A line that is not UTF-8 goes to `bad`
    (default: raises BadInput naming file and line); of a long line, the piece does.
    """
    if bad is None or not bad.skip:
        yield from _pieces(path, read, "strict")
        return
    number, inside = 1, False
    # bytes that are no UTF-8 become lone surrogates, which no UTF-8 gives
    for piece, ends_line in _pieces(path, read, "surrogateescape"):
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


def _pieces(path: Path, read: Callable[[int], None], errors: str) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    rest, number = "", 1
    with open_binary(path, read) as file:
        while True:
            data = file.read(READ)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = number + error.object[: error.start].count(b"\n")
                raise BadInput(f"{path}:{line}: {not_utf8(error)}") from None
            number += text.count("\n")
            *lines, rest = (rest + text).split("\n")
            for whole in lines:
                *heads, last = _cut(whole)
                yield from ((head, False) for head in heads)
                yield last.removesuffix("\r"), True
            *heads, rest = _cut(rest)
            yield from ((head, False) for head in heads)
            if not data:
                break
    if rest:
        yield rest.removesuffix("\r"), True


def _cut(text: str) -> Iterator[str]:
    """Parts of at most SEGMENT characters, at least one; all but the last end before a space or
    behind a mark."""
    start = 0
    while len(text) - start > SEGMENT:
        stop = start + SEGMENT
        found = _LAST_SPACE.match(text, start, stop) or _LAST_MARK.match(text, start, stop)
        end = found.end() if found else stop  # neither spaces nor marks: anywhere
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def documents(
    pieces: Iterable[tuple[str, bool]], options: TextOptions
) -> Iterator[tuple[str, bool]]:
    """(segment, does it end its document?) of one file's pieces."""
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
            # white space belongs to the word behind it, so a segment should not end in it
            if size > SEGMENT and (not piece[-1:].isspace() or size > 4 * SEGMENT):
                yield "".join(held), False
                held, size = [], 0
        new_line = ends_line
    if started:
        yield "".join(held), True


def batches(segments: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[bool], list[str]]]:
    """Segments in batches of about BATCH characters, as (ends of documents, texts)."""
    ends: list[bool] = []
    texts: list[str] = []
    size = 0
    for text, end in segments:
        texts.append(text)
        ends.append(end)
        size += len(text) + 16  # short lines cost time too
        if size >= BATCH:
            yield ends, texts
            ends, texts, size = [], [], 0
    if texts:
        yield ends, texts


def whole_document(text: str, options: TextOptions) -> Iterator[tuple[str, bool]]:
    """(segment, does it end the document?) of a document that is at hand as a whole."""
    if options.skip is not None:
        text = "\n".join(line for line in text.split("\n") if not options.skip.search(line))
    held = None
    for part in _cut(text):
        if held is not None:
            yield held, False
        held = part
    yield held or "", True


def read_documents(
    paths: Iterable[Path], options: TextOptions, read: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    """(segment, does it end its document?) of several files; a file's end ends a document."""
    for path in paths:
        form = options.format or inputs.format_of(path)
        if form == "text":
            yield from documents(read_pieces(path, read, options.bad), options)
            continue
        if form == "jsonl":
            texts = read_json_texts(path, options.json_field, options.bad, read)
        elif form == "java":
            texts = read_java(path, options.bad, read)
        else:
            texts = (sequence for _, _, sequence in read_fasta(path, options.bad, read))
        for text in texts:
            yield from whole_document(text, options)


class Seams:
    """Counts the words that the cuts between the segments of a document go through."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, segments: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """The segments as they are."""
        inside = False  # the segment before ended in a word that may go on
        for text, end in segments:
            if text:
                self.count += inside and not text[0].isspace()
                inside = not text[-1].isspace()
            inside &= not end
            yield text, end


def write_split(
    split: SplitWriter,
    paths: list[Path],
    encoders: Encoders,
    options: TextOptions,
    max_tokens: int,
) -> None:
    """Encode the files' documents into rows of at most `max_tokens` ids, and count their words."""
    cutter, seams, words = RowCutter(split, max_tokens), Seams(), 0
    total = sum(path.stat().st_size for path in paths)
    with Progress(f"encoding {split.directory.name}", total, "B") as shown:
        segments = seams.watch(read_documents(paths, options, shown.advance))
        for ids, lengths, ends, found in encoders.encode(batches(segments)):
            cutter.add(ids, lengths, ends)
            words += found
    split.words = words - seams.count
    if split.writers["tokens"].length == 0:
        raise BadInput(
            f"{inputs.names(paths)}: there is no text in it, so {split.directory.name} would be "
            "empty"
        )


def write_store(
    output: Path,
    splits: dict[str, list[Path]],
    tokenizer: Tokenizer,
    options: TextOptions,
    max_tokens: int,
    origin: dict[str, Any],
    overwrite: bool = False,
    workers: int = 1,
    documents: bool = False,
) -> dict[str, dict[str, Any]]:
    """Write one split for each entry of `splits` (name -> files), encoding in `workers` processes.
    Returns rows and tokens a split. `documents` adds a column `group` with each row's document.

    Raises BadInput (what cannot be read, a split without a document, an output that exists) and
    Failure (a process died).
    """
    columns = {"tokens": ""} | ({"group": "int32"} if documents else {})
    with create_store(output, tokenizer, columns, overwrite=overwrite) as store:
        tokenizer.save(store.directory)  # for the workers
        with Encoders(tokenizer, store.directory, workers) as encoders:
            for name, paths in splits.items():
                with store.split(name) as split:
                    write_split(split, paths, encoders, options, max_tokens)
        files = [path for paths in splits.values() for path in paths]
        origin = {**origin, "sources": sources(files), "max_tokens": max_tokens}
        store.finish("text", [], None, {**origin, **options.bad.as_origin()})
        return store.splits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `text`."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE|DIR|GLOB",
        help="Raw text in UTF-8, for "
        "the split train: files, directories (all their files with known endings, sorted by name), "
        "or quoted globs such as 'text/**/*.txt'.",
    )
    for split in ("valid", "test"):
        add(
            f"--{split}",
            nargs="+",
            default=[],
            metavar="FILE|DIR|GLOB",
            help=f"Raw text for the split {split} (default: no such split).",
        )
    add(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="TOK",
        help="The directory of a tokenizer, a store or a checkpoint.",
    )
    add(
        "--max-tokens",
        type=number(1),
        default=510,
        metavar="N",
        help="Tokens in a row at most; "
        "longer documents are cut into several rows (default: %(default)s).",
    )
    inputs.add_arguments(parser)
    add(
        "--lines",
        action="store_true",
        help="Every line of plain text is a document (default: "
        "documents are separated by blank lines).",
    )
    add(
        "--skip-lines",
        type=expression,
        metavar="REGEX",
        help="Leave out lines in which this "
        r"expression is found, such as '^\[\d+\]' for footnotes (default: none).",
    )
    add(
        "--documents",
        action="store_true",
        help="Also keep the number of each row's document, "
        "which `pairs` needs for next sentences and their order (default: do not).",
    )
    add(
        "--workers",
        type=number(1, 4096),
        metavar="N",
        help="Processes that encode, beside the "
        "one that reads and writes; 1: that one alone. A few megabytes are encoded without "
        "others in any case. The ids do not depend on it (default: all cores).",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Encode text files into a store."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    given = {"train": arguments.input, "valid": arguments.valid, "test": arguments.test}
    splits = {
        name: inputs.find_files(paths, arguments.format) for name, paths in given.items() if paths
    }
    inputs.check_distinct(splits)
    files = [path for paths in splits.values() for path in paths]
    formats = {arguments.format or inputs.format_of(path) for path in files}
    if arguments.lines and "text" not in formats:
        raise BadInput("--lines is for plain text; in other formats documents are marked")
    workers = arguments.workers or len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"] = str(workers)  # the tokenizers' threads, read when they start
    tokenizer = tokenizers.load(arguments.tokenizer)
    bad = BadRows(arguments.skip_bad)
    options = TextOptions(
        arguments.lines, arguments.skip_lines, arguments.format, arguments.field, bad
    )
    started = time.monotonic()
    written = write_store(
        arguments.output,
        splits,
        tokenizer,
        options,
        arguments.max_tokens,
        origin(),
        arguments.overwrite,
        workers,
        arguments.documents,
    )
    bad.report()
    size = sum(path.stat().st_size for path in files)
    summarise(arguments.output, written, started, size)
