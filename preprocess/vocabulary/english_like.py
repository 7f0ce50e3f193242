"""English-like pieces of a vocabulary and of a store (Zhang 2021, section 4.1).

xformer/data/english.py defines English-like pieces. Two vocabularies share a piece if it has the
same letters in both and plays the same role: it begins a word in both, or continues one in both. If
both vocabularies are of one kind, shared pieces are equal strings.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import published, tokenizers
from xformer.data.display import Progress, say
from xformer.data.english import english_pieces
from xformer.data.errors import BadInput
from xformer.data.files import installed, write_json
from xformer.data.joined import open_stores
from xformer.data.outputs import check_writable
from xformer.data.store import TEXTS, Ragged, Store
from xformer.data.tokenizers import Tokenizer

from ..arguments import add_json

WINDOW = 10  # pieces in a context
THRESHOLD = 5  # a context with more English-like pieces than this is English-like
BLOCK = 2**20  # ids, or rows, processed at once


def overlap(one: Tokenizer, other: Tokenizer) -> dict[str, Any]:
    """The numbers of pieces, of English-like pieces, and of shared English-like pieces.

    Zhang 2021, section 4.1 and table 2.
    """
    first, second = (english_pieces(tokenizer) for tokenizer in (one, other))
    return {
        "pieces": [len(one), len(other)],
        "english_like": [len(first), len(second)],
        "shared": len(set(first.values()) & set(second.values())),
    }


def contexts(store: Store, split: str, bar: Progress) -> dict[str, int]:
    """Count the windows of 10 pieces within rows, and those with more than 5 English-like pieces.

    Both numbers are given for all windows, and for the disjoint windows counted from the beginning
    of each row (Zhang 2021, section 4.1). The store is read in blocks, so memory does not
    grow with it.
    """
    like = np.zeros(store.vocab_size, np.int64)
    like[list(english_pieces(store.tokenizer()))] = 1
    totals = dict.fromkeys(("windows", "english_like", "disjoint", "disjoint_english_like"), 0)
    columns = store.split(split).columns
    for name in columns.keys() & set(TEXTS):  # other columns hold no token ids
        for counts, disjoint in _windows(columns[name], like, bar):
            many = counts > THRESHOLD
            totals["windows"] += len(many)
            totals["english_like"] += int(many.sum())
            totals["disjoint"] += int(disjoint.sum())
            totals["disjoint_english_like"] += int(many[disjoint].sum())
    return totals


def _windows(
    column: Ragged, like: np.ndarray, bar: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (English-like pieces in each window, is it one of the disjoint windows?) by block.

    `like` is 1 for the ids of English-like pieces. A window belongs to the block of its last piece.
    """
    for row in range(0, len(column), BLOCK):
        offsets = np.asarray(column.offsets[row : row + BLOCK + 1])
        for start in range(int(offsets[0]), int(offsets[-1]), BLOCK):
            stop = min(start + BLOCK, int(offsets[-1]))
            before = max(start - WINDOW + 1, int(offsets[0]))
            sums = np.cumsum(like[column.values[before:stop]])
            last = np.arange(start, stop)
            first = offsets[np.searchsorted(offsets, last, side="right") - 1]  # its row's start
            place = last - first
            last, place = last[place >= WINDOW - 1], place[place >= WINDOW - 1]
            ends = last - before
            counts = sums[ends] - np.where(ends >= WINDOW, sums[ends - WINDOW], 0)
            yield counts, place % WINDOW == WINDOW - 1
            bar.advance(stop - start)


def describe_contexts(store: Store) -> dict[str, Any]:
    """The numbers of `contexts` for every split, with shares (None for a split without a window).

    Raises BadInput if no split has a row of 10 pieces.
    """
    splits: dict[str, dict[str, Any]] = {}
    total = sum(store.split(name).tokens for name in store.splits)
    with Progress("counting", total, "tokens") as bar:
        for name in store.splits:
            totals = contexts(store, name, bar)
            splits[name] = {
                **totals,
                "share": _share(totals["english_like"], totals["windows"]),
                "disjoint_share": _share(totals["disjoint_english_like"], totals["disjoint"]),
            }
    if not any(split["windows"] for split in splits.values()):
        raise BadInput(
            f"{store.path} has no row of {WINDOW} pieces, so there is no context in it; give a "
            "store with longer rows"
        )
    return {
        "store": store.path.resolve().name,
        "window": WINDOW,
        "more_than": THRESHOLD,
        "splits": splits,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# ---------------------------------------------------------------------------------- commands


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at a path: of a tokenizer, store, checkpoint or run directory, or published.

    Raises BadInput if there is none.
    """
    real = installed(path)
    ours = (real / tokenizers.META).is_file() or (real / "result.json").is_file()
    return tokenizers.load_tokenizer(path) if ours else published.import_tokenizer(path)


def add_overlap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vocab-overlap`."""
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(),
            type=Path,
            metavar=name,
            help="A tokenizer, a store, a checkpoint, or a published vocabulary (a directory or a "
            "file, as for `tokenizer --from`).",
        )
    add_json(parser)


def run_overlap(arguments: argparse.Namespace) -> None:
    """Print the overlap of two vocabularies, and write it with --json."""
    if arguments.json is not None:
        check_writable(arguments.json)
    paths = [arguments.a, arguments.b]
    names = [path.name or str(path) for path in paths]
    numbers = {"vocabularies": names, **overlap(*map(read_tokenizer, paths))}
    width = max(map(len, names))
    say(f"{'':{width}}  {'pieces':>9}  {'English-like':>12}  {'in both':>9}")
    for name, pieces, like in zip(names, numbers["pieces"], numbers["english_like"], strict=True):
        say(f"{name:{width}}  {pieces:9,}  {like:12,}  {numbers['shared']:9,}")
    if arguments.json is not None:
        write_json(arguments.json, numbers)


def add_contexts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `english-contexts`."""
    parser.add_argument(
        "store",
        type=Path,
        metavar="STORE",
        help=f"The store's directory. A context is {WINDOW} consecutive pieces of a row. It counts "
        f"as English-like if more than {THRESHOLD} of its pieces have only letters A to Z.",
    )
    add_json(parser)


def run_contexts(arguments: argparse.Namespace) -> None:
    """Print the share of a store's contexts that are English-like, and write it with --json."""
    if arguments.json is not None:
        check_writable(arguments.json)
    shares = describe_contexts(open_stores(arguments.store))
    what = f"contexts of {WINDOW} pieces with more than {THRESHOLD} English-like ones"
    say(f"{shares['store']}: {what}")
    for name, split in shares["splits"].items():
        if not split["windows"]:
            say(f"{name}: no row of {WINDOW} pieces")
            continue
        say(
            f"{name}: {split['share']:.3%} ({split['english_like']:,} of {split['windows']:,}); "
            f"without overlap {split['disjoint_share']:.3%} "
            f"({split['disjoint_english_like']:,} of {split['disjoint']:,})"
        )
    if arguments.json is not None:
        write_json(arguments.json, shares)
