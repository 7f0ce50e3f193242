"""How English a vocabulary is, and how English a store (Zhang et al. 2021, section 4.1).

What an English-like piece is, is in xformer/data/english.py. Two vocabularies share a piece when
its letters are the same and it stands in both at the beginning of a word, or in both elsewhere:
within one kind, when it is the same piece.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import published, tokenizers
from xformer.data.display import Progress, say
from xformer.data.english import english
from xformer.data.errors import BadInput
from xformer.data.files import write_json
from xformer.data.store import Ragged, Store, open_store
from xformer.data.tokenizers import Tokenizer

from ..arguments import add_json, check_file

WINDOW = 10  # pieces in a context
MOST = 5  # a context with more English-like pieces than these is English-like
BLOCK = 2**20  # ids, or rows, looked at at once


def overlap(one: Tokenizer, other: Tokenizer) -> dict[str, Any]:
    """Pieces and English-like pieces of two vocabularies, and how many of these both have.

    Zhang et al. 2021, section 4.1 and table 2.
    """
    first, second = (english(tokenizer) for tokenizer in (one, other))
    return {
        "pieces": [len(one), len(other)],
        "english_like": [len(first), len(second)],
        "shared": len(set(first.values()) & set(second.values())),
    }


def contexts(store: Store, split: str, shown: Progress) -> dict[str, int]:
    """How many windows of 10 pieces within a row there are, and how many hold more than 5
    English-like ones: all windows, and those that do not overlap (from a row's beginning on).

    Zhang et al. 2021, section 4.1. The store is read in blocks: memory does not grow with it.
    """
    like = np.zeros(store.vocab_size, np.int64)
    like[list(english(store.tokenizer()))] = 1
    found = dict.fromkeys(("windows", "english_like", "disjoint", "disjoint_english_like"), 0)
    for column in store.split(split).columns.values():
        if isinstance(column, Ragged):
            for counts, disjoint in _windows(column, like, shown):
                many = counts > MOST
                found["windows"] += len(many)
                found["english_like"] += int(many.sum())
                found["disjoint"] += int(disjoint.sum())
                found["disjoint_english_like"] += int(many[disjoint].sum())
    return found


def _windows(
    column: Ragged, like: np.ndarray, shown: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(English-like pieces in each window, is it one of those that do not overlap?), in blocks.

    A block holds the windows whose last piece lies in it.
    """
    for row in range(0, len(column), BLOCK):
        offsets = np.asarray(column.offsets[row : row + BLOCK + 1])
        for start in range(int(offsets[0]), int(offsets[-1]), BLOCK):
            stop = min(start + BLOCK, int(offsets[-1]))
            before = max(start - WINDOW + 1, int(offsets[0]))
            sums = np.cumsum(like[column.values[before:stop]])
            last = np.arange(start, stop)
            first = offsets[np.searchsorted(offsets, last, side="right") - 1]  # of its row
            place = last - first
            last, place = last[place >= WINDOW - 1], place[place >= WINDOW - 1]
            ends = last - before
            counts = sums[ends] - np.where(ends >= WINDOW, sums[ends - WINDOW], 0)
            yield counts, place % WINDOW == WINDOW - 1
            shown.advance(stop - start)


def describe(store: Store) -> dict[str, Any]:
    """`contexts` of every split, with their shares (None in a split without a window).

    Raises BadInput where no split has a row of 10 pieces.
    """
    splits: dict[str, dict[str, Any]] = {}
    total = sum(store.split(name).tokens for name in store.splits)
    with Progress("counting", total, "tokens") as shown:
        for name in store.splits:
            found = contexts(store, name, shown)
            splits[name] = {
                **found,
                "share": _share(found["english_like"], found["windows"]),
                "disjoint_share": _share(found["disjoint_english_like"], found["disjoint"]),
            }
    if not any(split["windows"] for split in splits.values()):
        raise BadInput(f"{store.path} has no row of {WINDOW} pieces, so there is no context in it")
    return {"store": store.path.name, "window": WINDOW, "more_than": MOST, "splits": splits}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# ---------------------------------------------------------------------------------- commands


def read(path: Path) -> Tokenizer:
    """The tokenizer of a directory of ours (tokenizer, store, checkpoint, run) or a published one.

    Raises BadInput where there is none.
    """
    ours = (path / tokenizers.META).is_file() or (path / "result.json").is_file()
    return tokenizers.load(path) if ours else published.read(path)


def add_overlap_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vocab-overlap`."""
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(),
            type=Path,
            metavar=name,
            help="A tokenizer, a store, a checkpoint, or a vocabulary as it is published "
            "(a directory or a file, as for `tokenizer --from`).",
        )
    add_json(parser)


def run_overlap(arguments: argparse.Namespace) -> None:
    """Print, and perhaps write, the figures of two vocabularies."""
    check_file(arguments.json)
    paths = [arguments.a, arguments.b]
    names = [path.name or str(path) for path in paths]
    found = {"vocabularies": names, **overlap(*map(read, paths))}
    width = max(map(len, names))
    say(f"{'':{width}}  {'pieces':>9}  {'English-like':>12}  {'in both':>9}")
    for name, pieces, like in zip(names, found["pieces"], found["english_like"], strict=True):
        say(f"{name:{width}}  {pieces:9,}  {like:12,}  {found['shared']:9,}")
    if arguments.json is not None:
        write_json(arguments.json, found)


def add_contexts_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `english-contexts`."""
    parser.add_argument(
        "store",
        type=Path,
        metavar="STORE",
        help="The store's directory. A "
        f"context is {WINDOW} pieces in a row of a text; it is English-like when it holds more "
        f"than {MOST} pieces that are.",
    )
    add_json(parser)


def run_contexts(arguments: argparse.Namespace) -> None:
    """Print, and perhaps write, the share of a store's contexts that are English-like."""
    check_file(arguments.json)
    found = describe(open_store(arguments.store))
    say(f"{found['store']}: contexts of {WINDOW} pieces with more than {MOST} English-like ones")
    for name, split in found["splits"].items():
        if not split["windows"]:
            say(f"{name}: no row of {WINDOW} pieces")
            continue
        say(
            f"{name}: {split['share']:.3%} ({split['english_like']:,} of {split['windows']:,}); "
            f"not overlapping {split['disjoint_share']:.3%} "
            f"({split['disjoint_english_like']:,} of {split['disjoint']:,})"
        )
    if arguments.json is not None:
        write_json(arguments.json, found)
