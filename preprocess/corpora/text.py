"""`text`: encode raw text into the rows of a store, in memory that does not grow with the input."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.data import tokenizers
from xformer.data.arguments import whole_number
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.files import read_json, usable_cores
from xformer.data.outputs import check_directory
from xformer.data.store import Ragged, Store, open_store
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import (
    add_output,
    add_skip_lines,
    add_tokenizer,
    command_origin,
    part_number,
    say_written,
)
from ..bad import BadRows
from ..binarize import BATCH, RowCutter, sources
from ..words import CachedEncoder
from ..workers import in_order
from . import inputs
from .documents import READ, Segments, TextOptions, files_of_part, read_documents, read_part

LONGEST = 510  # tokens of BERT's longest row, without its two special tokens
LONG, OFTEN = 16, 0.01  # tokens of a row that is compared; a share of repeated rows that is told
NEARLY_ALL = 0.95  # of the words: if so many are numbers, they may be token ids
AT_ONCE, HASHED = 2**16, 64  # rows that are compared at once, and their first tokens


TextBatch = tuple[list[bool], list[str]]  # does each text end its document?, the texts


class EncodedBatch(NamedTuple):
    """The ids of a batch of texts one after the other, how many each text has, whether each ends
    its document, and what is counted in the texts: words between white space, those of them that
    may be token ids, characters, and the characters that became unknown tokens."""

    ids: np.ndarray
    lengths: np.ndarray
    ends: list[bool]
    words: int
    numbers: int
    characters: int
    unknown: int


def batch_encoder(tokenizer: Tokenizer, processes: int) -> Callable[[TextBatch], EncodedBatch]:
    """A function that encodes a batch, for one of so many processes."""
    encoder = CachedEncoder(tokenizer, processes)

    def encode(batch: TextBatch) -> EncodedBatch:
        ends, texts = batch
        before = encoder.unknown
        ids, lengths = encoder.encode(texts)
        words = [word for text in texts for word in text.split()]
        numbers = 0 if tokenizer.symbols else sum(map(str.isdigit, words))
        characters, unknown = sum(map(len, texts)), encoder.unknown - before
        return EncodedBatch(ids, lengths, ends, len(words), numbers, characters, unknown)

    return encode


def segment_batches(segments: Iterable[tuple[str, bool]]) -> Iterator[TextBatch]:
    """Group segments into batches of about BATCH characters, as (ends of documents, texts)."""
    ends: list[bool] = []
    texts: list[str] = []
    size = 0
    for text, end in segments:
        texts.append(text)
        ends.append(end)
        size += len(text) + 16  # a short text takes time too
        if size >= BATCH:
            yield ends, texts
            ends, texts, size = [], [], 0
    if texts:
        yield ends, texts


class CutWords:
    """Counts the words that are cut in two between the segments of a document."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, segments: Iterable[tuple[str, bool]]) -> Segments:
        """Yield the segments unchanged, and count."""
        inside = False  # the previous segment ended in a word that may go on
        for text, end in segments:
            if text:
                self.count += inside and not text[0].isspace()
                inside = not text[-1].isspace()
            inside &= not end
            yield text, end


def write_text_split(
    split: SplitWriter,
    paths: list[Path],
    encode: Callable[[TextBatch], EncodedBatch],
    options: TextOptions,
    max_tokens: int,
    workers: int = 1,
    part: tuple[int, int] | None = None,
) -> None:
    """Encode the documents of files, or only those of a `part`, into rows of at most `max_tokens`
    ids. Count their words."""
    cutter, cut_words, words, numbers = RowCutter(split, max_tokens), CutWords(), 0, 0
    files = paths if part is None else [path for path, *_ in files_of_part(paths, part)]
    total = sum(path.stat().st_size for path in files)
    with Progress(f"encoding {split.directory.name}", total, "B") as bar:
        if part is None:
            read = read_documents(paths, options, bar.advance)
        else:
            read = read_part(paths, part, options, bar.advance)
        segments = cut_words.watch(read)
        with closing(in_order(encode, segment_batches(segments), workers)) as batches:
            for batch in batches:
                cutter.add(batch.ids, batch.lengths, batch.ends)
                words += batch.words
                numbers += batch.numbers
                split.count_characters(batch.characters, batch.unknown)
    if numbers > NEARLY_ALL * words:
        line = f"note: {100 * numbers / words:.3g} % of the words of {split.directory.name} are"
        line += " numbers. If they are token ids, they have been encoded again, as text: give the"
        say(f"{line} text itself, or make a tokenizer of the ids by --kind words", error=True)
    split.words = words - cut_words.count
    if split.writers["tokens"].length:
        return
    if part is not None:
        raise BadInput(
            f"--part {part[0]}/{part[1]}: no document begins in this part; files are divided about "
            "every 64 KiB, so give fewer parts"
        )
    raise BadInput(
        f"{inputs.first_names(paths)}: no text found, so {split.directory.name} would be empty; "
        "give files with text"
    )


def write_text_store(
    output: Path,
    splits: dict[str, list[Path]],
    tokenizer: Tokenizer,
    options: TextOptions,
    max_tokens: int,
    origin: dict[str, Any],
    overwrite: bool = False,
    workers: int = 1,
    documents: bool = False,
    part: tuple[int, int] | None = None,
) -> dict[str, dict[str, Any]]:
    """Write a store with one split for each entry of `splits` (name -> files).

    `workers` processes encode. `documents` adds a column `group` with the number of each row's
    document. With a `part`, the split train has only the documents of this part, and the other
    splits are written with part 1. Returns the number of rows and tokens of each split. Raises
    BadInput for input that cannot be read, for a split without text, and for an output that exists
    without `overwrite`. Raises Failure if a process dies.
    """
    columns = {"tokens": ""} | ({"group": "int32"} if documents else {})
    encode = batch_encoder(tokenizer, workers)
    with create_store(output, tokenizer, columns, overwrite=overwrite) as store:
        for name, paths in splits.items():
            if name == "train" or part is None or part[0] == 1:
                with store.split(name) as split:
                    own = part if name == "train" else None
                    write_text_split(split, paths, encode, options, max_tokens, workers, own)
        made_with = [max_tokens, documents, tokenizer.fingerprint]
        read = _what_was_read(splits, options, made_with, part)
        origin = {**origin, **read, "max_tokens": max_tokens}
        store.finish("text", [], None, {**origin, **options.bad.as_origin()})
        return store.splits


def repeated_rows(store: Store) -> list[str]:
    """A note for each split if a share of more than OFTEN of its rows is also in train. Rows of
    fewer than LONG tokens do not count, because headings and short lines recur in any text."""
    notes, train = [], store.split("train").columns["tokens"]
    for name in (name for name in store.splits if name != "train"):
        known = np.concatenate(list(_hashes(store.split(name).columns["tokens"])))
        repeated = np.zeros(len(known), bool)
        with Progress(f"comparing {name} with train", len(train), "rows") as bar:
            for hashes in _hashes(train, bar) if len(known) else ():
                repeated |= np.isin(known, hashes)
        if (count := int(repeated.sum())) > OFTEN * len(known):
            share = f"{count:,} of the {len(known):,} rows of {name} with at least {LONG} tokens"
            notes.append(f"note: {share} are in train, too, so the loss on {name} says less")
    return notes


def _hashes(rows: Ragged, progress: Progress | None = None) -> Iterator[np.ndarray]:
    """The hashes of the rows of at least LONG tokens, uint64, in pieces: of the number of tokens
    and the first HASHED of them, a random number for each id times one for its place."""
    draw = np.random.default_rng(0)
    of_id, of_place = (draw.integers(2**64, size=n, dtype=np.uint64) for n in (2**18, HASHED))
    for first in range(0, len(rows), AT_ONCE):
        ends = np.asarray(rows.offsets[first : first + AT_ONCE + 1], np.int64)
        starts, lengths = ends[:-1], np.diff(ends)
        long = lengths >= LONG
        places = np.minimum(np.arange(HASHED), lengths[long, None] - 1) + starts[long, None]
        ids = np.asarray(rows.values[places], np.int64) % len(of_id)
        if progress is not None:
            progress.advance(len(starts))
        yield (of_id[ids] * of_place).sum(1) + lengths[long].astype(np.uint64)


def _what_was_read(
    splits: dict[str, list[Path]],
    options: TextOptions,
    made_with: list[Any],
    part: tuple[int, int] | None,
) -> dict[str, Any]:
    """What the origin of a store records about its files. That of a part also has its number, an
    `input` that is equal in all parts of the same store, and `sums`: {number of a file in the whole
    input: its SHA-256}."""
    if part is None:
        return {"sources": sources([path for paths in splits.values() for path in paths])}
    train = splits["train"]
    others = [path for name, paths in splits.items() if name != "train" for path in paths]
    files = [path for path, *_ in files_of_part(train, part)]
    read = sources([*files, *(others if part[0] == 1 else [])])  # part 1 has the other splits
    numbers = {path: str(number) for number, path in enumerate(train)}
    sums = {numbers[path]: source["sha256"] for path, source in zip(files, read, strict=False)}
    named = [[path.name, path.stat().st_size, inputs.format_of(path)] for path in train]
    skip = options.skip and options.skip.pattern
    how = [options.by_line, skip, options.format, options.json_field, options.bad.skip, READ]
    digest = sha256(repr([part[1], named, how, made_with]).encode()).hexdigest()
    record = {"number": part[0], "of": part[1], "input": digest, "sums": sums}
    return {"part": record, "sources": read}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `text`."""
    _add_sources(parser)
    inputs.add_arguments(parser)
    _add_reading(parser)
    parser.add_argument(
        "--workers",
        type=whole_number(1, 4096),
        metavar="N",
        help="The number of processes that encode, while the main process reads and writes. With "
        "1, if there are only a few megabytes, or on macOS, the main process does everything. The "
        "ids are the same for every N (default: all cores).",
    )
    parser.add_argument(
        "--part",
        type=part_number,
        metavar="PART/PARTS",
        help="Write only this part of the store, such as 3/16, so that many jobs can share the "
        "work. The documents of the split train are divided in their order, to within about "
        "64 KiB of the input. Part 1 also has the other splits. `join` makes one store of all "
        "parts, with the same rows in the same order (default: write the whole store).",
    )
    add_output(parser, "STORE")


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is read, and into which ids and rows it is divided."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE|DIR|GLOB",
        help="Raw text in UTF-8 for the split train: files, directories (all their files with "
        "known extensions, sorted by name), or quoted globs such as 'text/**/*.txt'.",
    )
    for split in ("valid", "test"):
        add(
            f"--{split}",
            nargs="+",
            default=[],
            metavar="FILE|DIR|GLOB",
            help=f"Raw text for the split {split} (default: the store has no such split).",
        )
    add_tokenizer(parser)
    add(
        "--max-tokens",
        type=whole_number(1),
        metavar="N",
        help="The maximum number of tokens in a row, special tokens not included. A longer "
        f"document is cut into several rows (default: {LONGEST}, or fewer if TOK is a checkpoint "
        "whose model takes only shorter rows).",
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how plain text is divided into documents."""
    add = parser.add_argument
    add(
        "--lines",
        action="store_true",
        help="Make every line of plain text a document (default: documents are separated by blank "
        "lines).",
    )
    add_skip_lines(parser)
    add(
        "--documents",
        action="store_true",
        help="Also store the number of each row's document, which `pairs` needs for next sentences "
        "and sentence order (default: do not store it).",
    )


def longest_row(directory: str | Path) -> int | None:
    """The longest row, special tokens included, that the model of a checkpoint or a finished run
    takes. None if the directory holds no model."""
    file = tokenizers.model_directory(directory) / "config.json"
    content = read_json(file) if file.is_file() else None
    model = content.get("model") if isinstance(content, dict) else None
    longest = model.get("max_positions") if isinstance(model, dict) else None
    return longest if type(longest) is int else None


def _longest(tokenizer: Path, given: int | None) -> int:
    """The length of a row: as `given`, or else the default. Prints a note if `given` is too long
    for the tokenizer's model, or if that model lowers the default."""
    limit = longest_row(tokenizer)
    if given is not None:
        if limit is not None and given > limit - 2:
            line = f"note: --max-tokens {given} is more than the model of {tokenizer} can read"
            say(f"{line}; for that model give {limit - 2} at most", error=True)
        return given
    if limit is None or not 2 < limit < LONGEST + 2:
        return LONGEST
    line = f"rows of {limit - 2} tokens, because the model of {tokenizer} takes at most {limit},"
    say(f"{line} two special ones included (--max-tokens changes this)", error=True)
    return limit - 2


def run(arguments: argparse.Namespace) -> None:
    """Encode text files into a store."""
    named = {"train": arguments.input, "valid": arguments.valid, "test": arguments.test}
    splits = {
        name: inputs.find_files(paths, arguments.format) for name, paths in named.items() if paths
    }
    inputs.check_distinct(splits)
    files = [path for paths in splits.values() for path in paths]
    check_directory(arguments.output, arguments.overwrite, ("store.json",), *files)
    formats = {arguments.format or inputs.format_of(path) for path in files}
    if arguments.lines and "text" not in formats:
        raise BadInput(
            "--lines is for plain text; leave it out, because other formats mark their documents"
        )
    workers = arguments.workers or usable_cores()
    os.environ["RAYON_NUM_THREADS"] = str(workers)  # tokenizers reads it when it starts threads
    if workers > 1:  # else tokenizers warns of forks
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = tokenizers.load_tokenizer(arguments.tokenizer)
    bad = BadRows(arguments.skip_bad)
    options = TextOptions(
        arguments.lines, arguments.skip_lines, arguments.format, arguments.field, bad
    )
    started = time.monotonic()
    with bad:
        written = write_text_store(
            arguments.output,
            splits,
            tokenizer,
            options,
            _longest(arguments.tokenizer, arguments.max_tokens),
            command_origin(),
            arguments.overwrite,
            workers,
            arguments.documents,
            arguments.part,
        )
    size = sum(path.stat().st_size for path in files) if arguments.part is None else 0
    say_written(arguments.output, written, started, size)
    if arguments.part is None and len(splits) > 1:
        say(*repeated_rows(open_store(arguments.output)), error=True)
