"""Plain text -> documents -> rows of a store, in memory that does not grow with the input.

A document is what stands between blank lines, or one line with `--lines`. Long documents are
encoded in segments, cut where the tokenizers cut anyway (before a single space or a line end), so
that the ids are those of the whole document.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.arguments import add_output, check_output, expression, number, origin, summarise
from preprocess.binarize import BATCH, RowCutter, check_files, not_utf8, sources
from preprocess.progress import progress
from preprocess.words import Encoder
from xformer.data import tokenizers
from xformer.data.errors import BadInput
from xformer.data.store import SplitWriter, create_store
from xformer.data.tokenizers import Tokenizer

READ = 2**20  # bytes read at once
SEGMENT = 2**15  # characters of a document encoded as one text

# the last place before the end where a single space stands between words
_LAST_SPACE = re.compile(r".*\S(?= \S)", re.DOTALL)


@dataclass(frozen=True)
class TextOptions:
    """How a text file falls into documents: by blank lines or `by_line`, without lines in which
    the expression `skip` is found."""

    by_line: bool = False
    skip: re.Pattern[str] | None = None


def read_pieces(path: Path, read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
    """(piece, does it end its line?) in order; lines longer than SEGMENT come in pieces.

    `read` is told of every block's bytes. Raises BadInput naming file and line where the bytes are
    not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, number = "", 1
    with path.open("rb") as file:
        while True:
            data = file.read(READ)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = number + error.object[: error.start].count(b"\n")
                raise BadInput(f"{path}:{line}: {not_utf8(error)}") from None
            read(len(data))
            number += text.count("\n")
            *lines, rest = (rest + text).split("\n")
            for whole in lines:
                while len(whole) > SEGMENT:
                    head, whole = _cut(whole)
                    yield head, False
                yield whole.removesuffix("\r"), True
            while len(rest) > SEGMENT:
                head, rest = _cut(rest)
                yield head, False
            if not data:
                break
    if rest:
        yield rest.removesuffix("\r"), True


def _cut(text: str) -> tuple[str, str]:
    found = _LAST_SPACE.match(text, 0, SEGMENT)
    end = found.end() if found else SEGMENT  # no space at all: anywhere
    return text[:end], text[end:]


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


def read_documents(
    paths: Iterable[Path], options: TextOptions, read: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    """(segment, does it end its document?) of several files; a file's end ends a document."""
    for path in paths:
        yield from documents(read_pieces(path, read), options)


def write_split(
    split: SplitWriter,
    paths: list[Path],
    encoder: Encoder,
    options: TextOptions,
    max_tokens: int,
) -> None:
    """Encode the files' documents into rows of at most `max_tokens` ids."""
    cutter = RowCutter(split, max_tokens)
    total = sum(path.stat().st_size for path in paths)
    with progress(f"encoding {split.directory.name}", total, "B") as shown:
        segments = read_documents(paths, options, shown.add)
        for ends, texts in batches(segments):
            cutter.add(*encoder.encode(texts), ends)
    if split.writers["tokens"].length == 0:
        names = ", ".join(map(str, paths))
        raise BadInput(f"{names}: there is no text in it, so {split.directory.name} would be empty")


def write_store(
    output: Path,
    splits: dict[str, list[Path]],
    tokenizer: Tokenizer,
    options: TextOptions,
    max_tokens: int,
    origin: dict[str, Any],
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Write one split for each entry of `splits` (name -> files). Returns rows and tokens a split.

    Raises BadInput (invalid UTF-8, a split without a document, an output that exists).
    """
    encoder = Encoder(tokenizer)
    with create_store(output, tokenizer, {"tokens": ""}, overwrite=overwrite) as store:
        for name, paths in splits.items():
            with store.split(name) as split:
                write_split(split, paths, encoder, options, max_tokens)
        files = [path for paths in splits.values() for path in paths]
        origin = {**origin, "sources": sources(files), "max_tokens": max_tokens}
        store.finish("text", [], None, origin)
        return store.splits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `text`."""
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="FILE",
        help="Raw text in UTF-8, for the split train.")  # fmt: skip
    for split in ("valid", "test"):
        add(f"--{split}", type=Path, nargs="+", default=[], metavar="FILE",
            help=f"Raw text for the split {split} (default: no such split).")  # fmt: skip
    add("--tokenizer", type=Path, required=True, metavar="TOK",
        help="The directory of a tokenizer, a store or a checkpoint.")  # fmt: skip
    add("--max-tokens", type=number(1), default=510, metavar="N", help="Tokens in a row at most; "
        "longer documents are cut into several rows (default: %(default)s).")  # fmt: skip
    add("--lines", action="store_true", help="Every line is a document (default: documents are "
        "separated by blank lines).")  # fmt: skip
    add("--skip-lines", type=expression, metavar="REGEX", help="Leave out lines in which this "
        r"expression is found, such as '^\[\d+\]' for footnotes (default: none).")  # fmt: skip
    add("--workers", type=number(1, 4096), metavar="N",
        help="Threads that encode (default: all cores).")  # fmt: skip
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Encode text files into a store."""
    splits = {"train": arguments.input, "valid": arguments.valid, "test": arguments.test}
    splits = {name: paths for name, paths in splits.items() if paths}
    files = [path for paths in splits.values() for path in paths]
    check_output(arguments.output, arguments.overwrite, "store.json")
    check_files(files)
    if arguments.workers:  # read by the tokenizers' thread pool when it starts
        os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    tokenizer = tokenizers.load(arguments.tokenizer)
    options = TextOptions(arguments.lines, arguments.skip_lines)
    started = time.monotonic()
    written = write_store(
        arguments.output, splits, tokenizer, options, arguments.max_tokens, origin(),
        arguments.overwrite,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in files)
    summarise(arguments.output, written, started, size)
