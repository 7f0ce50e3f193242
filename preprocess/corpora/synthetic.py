"""Artificial corpora, written directly into a store (Chiang and Lee 2020, sections 3, 4.2 and 4.3;
Kao and Lee 2021, section 4.4.2).

- uniform: every token is drawn independently from the uniform distribution.
- zipf: every token is drawn independently from given frequencies.
- nesting: a stack of open tokens. With probability `push`, a token is drawn, placed in the sequence
  and pushed. Otherwise the top of the stack is popped and placed in the sequence.
- flat: like nesting, but any of the open tokens is popped, with equal probability. Every token
  still has a match, but pairs can cross.
- shuffle: k-Shuffle Dyck (Hu et al. 2025, arXiv 2502.19249). There are k kinds of brackets with
  equal probability. Each has its own opening and closing token. Any open bracket may close next, so
  pairs can cross. When `depth` brackets are open, one of them closes.

In nesting and flat both tokens of a pair are equal, as in the papers. With `partners` "different"
they are the two tokens of a couple, in either order. The most frequent token and the second form a
couple, the third and the fourth, and so on. Of an odd number of tokens the rarest does not occur.

The papers leave some rules open. Here every sequence starts with an empty stack, a pop from an
empty stack becomes a push, and a sequence ends when it reaches its length, which is drawn uniformly
from a range. Tokens that are still on the stack then have no match.

Many sequences are generated at once, one time step after another, in blocks. Each block has its own
random numbers, so several processes can share the work and the corpus does not depend on their
number.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import vocabularies
from xformer.data.arguments import whole_number
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.files import usable_cores
from xformer.data.joined import open_stores
from xformer.data.outputs import check_directory
from xformer.data.store import MAX_PIECES, Store
from xformer.data.writing import SplitWriter, create_store

from ..arguments import (
    add_output,
    command_origin,
    fraction,
    length_range,
    say_written,
)
from ..stats import id_counts
from ..workers import in_order

BLOCK_TOKENS = 2**20  # tokens generated at once
LEAST_ROWS = 2**11  # at least this many sequences at once, because a step has a fixed cost
DRAWN_AT_ONCE = 2**14  # tokens, few enough that intermediate results fit into a cache
SPECIAL_IDS = 5  # ids 0 to 4
VALID_SHARE = 0.05  # size of the split `valid` relative to `train`
VOCABULARY = 30_000  # default size


@dataclass(frozen=True)
class Corpus:
    """Describes a corpus to generate.

    `tokens` is the size of the training split. `lengths` is the range of a sequence's length, both
    ends included. `distinct` is the number of different tokens that may occur (None: all), or for
    shuffle the number of kinds of brackets. `push` is used by nesting, flat and shuffle, `depth`
    (None: no limit) by shuffle, `partners` ("equal" or "different") by nesting and flat.
    """

    generator: str
    tokens: int
    lengths: tuple[int, int]
    seed: int
    distinct: int | None = None
    push: float = 0.4
    depth: int | None = None
    partners: str = "equal"


def weights(corpus: Corpus, vocab_size: int, counts: np.ndarray | None) -> np.ndarray:
    """The probability of each id, float64 (vocab_size,). Special ids have probability 0.

    Probabilities follow `counts`, one number for each id. Without `counts` they are uniform, or for
    "zipf" proportional to 1 / rank. With `distinct`, only the most frequent ids remain, and
    without `counts` the first ones, as in Chiang and Lee 2020, section 4.3. Different partners
    need an even number of ids, so the last one may be left out. Raises BadInput if fewer ids than
    `distinct` can occur, or fewer than two partners.
    """
    frequencies = np.ones(vocab_size)
    if counts is not None:
        frequencies = counts.astype(np.float64)
    elif corpus.generator == "zipf":
        frequencies = 1.0 / np.maximum(np.arange(vocab_size) - SPECIAL_IDS + 1, 1)
    frequencies[:SPECIAL_IDS] = 0
    available = np.count_nonzero(frequencies)
    kept = available if corpus.distinct is None else corpus.distinct
    if kept > available:
        raise BadInput(f"--distinct {kept} is too large: only {available} tokens can occur")
    if corpus.partners == "different":
        kept -= kept % 2
        if not kept:
            raise BadInput("--partners different needs at least two tokens that can occur")
    frequencies[np.argsort(-frequencies, kind="stable")[kept:]] = 0
    return frequencies / frequencies.sum()


def closing_ids(corpus: Corpus, probabilities: np.ndarray) -> np.ndarray | None:
    """The id that closes each id, (vocab_size,), or None if every token closes itself.

    The partners of a couple are neighbours in the order of falling probability. Of equally
    probable ids the lower comes first. An id that cannot occur closes itself.
    """
    ids = np.arange(len(probabilities))
    if corpus.generator == "shuffle":
        return ids + (corpus.distinct or 0)
    if corpus.partners == "equal":
        return None
    order = np.argsort(-probabilities, kind="stable")
    last = np.count_nonzero(probabilities)
    first, second = order[0:last:2], order[1:last:2]
    ids[first], ids[second] = second, first
    return ids


@dataclass(frozen=True)
class AliasTable:
    """Draws ids with given probabilities in constant time (Walker's alias method).

    The table has one column for each id, and more columns until their number is a power of two. All
    columns have the same mass, so the last bits of a random 64-bit number choose a column. If the
    64-bit number is below the column's `keep`, the id drawn is the number of the column. Otherwise
    the column's `step` is added to it. The sum wraps around, because the type is unsigned.
    """

    keep: np.ndarray  # uint64 (columns,)
    step: np.ndarray  # uint16 (columns,), or uint32 if there are more than 2**16 columns
    closers: np.ndarray | None = None  # see `closing_ids`

    def draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """Draw `n` ids, of the type of `step`."""
        numbers = generator.integers(2**64, size=n, dtype=np.uint64)
        ids = numbers.astype(self.step.dtype) & self.step.dtype.type(len(self.step) - 1)
        ids += self.step.take(ids) * (numbers >= self.keep.take(ids))
        return ids


def alias_table(probabilities: np.ndarray, closers: np.ndarray | None = None) -> AliasTable:
    """The table for probabilities, float64 (vocab_size,), that sum to 1."""
    columns = 1 << (len(probabilities) - 1).bit_length()
    mass = np.zeros(columns)
    mass[: len(probabilities)] = probabilities * columns
    keep, other = np.ones(columns), np.arange(columns)
    small, large = np.flatnonzero(mass < 1).tolist(), np.flatnonzero(mass >= 1).tolist()
    while small and large:
        low, high = small.pop(), large[-1]
        keep[low], other[low] = mass[low], high
        mass[high] -= 1 - mass[low]
        if mass[high] < 1:
            small.append(large.pop())
    # The factor is below 2**64, so that every bound fits into uint64. That is exact enough: if keep
    # is 1, a random number may exceed the bound, but then step is 0 and the id stays the same.
    bounds = (keep * (2**64 - 2**11)).astype(np.uint64)
    steps = other - np.arange(columns)
    kind = np.uint16 if columns <= 2**16 else np.uint32
    closers = None if closers is None else closers.astype(kind)
    return AliasTable(bounds, steps.astype(kind), closers)


def independent(
    generator: np.random.Generator, table: AliasTable, lengths: np.ndarray, corpus: Corpus
) -> np.ndarray:
    """Sequences of these lengths, one after the other, of tokens drawn independently."""
    made = np.empty(int(lengths.sum()), table.step.dtype)
    for start in range(0, len(made), DRAWN_AT_ONCE):
        piece = made[start : start + DRAWN_AT_ONCE]
        piece[:] = table.draw(generator, len(piece))
    return made


def parentheses(
    generator: np.random.Generator, table: AliasTable, lengths: np.ndarray, corpus: Corpus
) -> np.ndarray:
    """Sequences of these lengths, one after the other, of the grammars nesting, flat and shuffle.

    Each time step extends all unfinished sequences at once. Sequences are sorted by length, longest
    first, so the unfinished ones come first. The stacks are stored level by level, with one slot
    for each sequence in a level, so the memory in use is small and stays in the cache.
    """
    flat, bound = corpus.generator != "nesting", int(corpus.push * 2**32)
    order = np.argsort(-lengths, kind="stable")
    rows, steps = len(lengths), int(lengths.max())
    active = rows - np.cumsum(np.bincount(lengths))  # sequences longer than 0, 1, 2, ...
    made = np.empty(int(lengths.sum()), table.step.dtype)
    place = (np.cumsum(lengths) - lengths)[order]  # the index of each sequence's first token
    stack = np.empty((steps + 1) * rows, table.step.dtype)
    free = np.arange(rows)  # the lowest free slot of each sequence
    for step in range(steps):
        unfinished = int(active[step])
        halves = generator.integers(2**64, size=(unfinished + 1) // 2, dtype=np.uint64)
        drawn = halves.view(np.uint32)[:unfinished]
        pushed = (drawn < bound) | (free[:unfinished] < rows)
        if corpus.depth is not None:
            pushed &= free[:unfinished] < corpus.depth * rows
        push, pop = np.flatnonzero(pushed), np.flatnonzero(~pushed)
        slot = free.take(push)
        made[place.take(push) + step] = stack[slot] = table.draw(generator, len(push))
        free[push] = slot + rows
        top = free.take(pop) - rows
        free[pop] = slot = top
        if flat:
            # The random number that decided on the pop also chooses one of the open tokens. It is
            # uniform from `bound` to 2**32. If the pop was forced by the depth, the number may also
            # be below `bound`, and is then uniform from 0 to `bound`. The token at the top of the
            # stack moves to the slot of the chosen token.
            value = drawn.take(pop).astype(np.float64)
            uniform = np.where(
                value < bound, value / max(bound, 1), (value - bound) / (2**32 - bound)
            )
            slot = (uniform * (top // rows + 1)).astype(np.int64) * rows + pop
        opening = stack.take(slot)
        closer = opening if table.closers is None else table.closers.take(opening)
        made[place.take(pop) + step] = closer
        stack[slot] = stack.take(top)
    return made


GENERATORS = {
    "uniform": independent,
    "zipf": independent,
    "nesting": parentheses,
    "flat": parentheses,
    "shuffle": parentheses,
}
BRACKETS = ("nesting", "flat", "shuffle")
PARTNERED = ("nesting", "flat")  # they have the option --partners
WITHOUT_FREQUENCIES = ("uniform", "shuffle")  # they have no option --frequencies


def stream(corpus: Corpus, split: str, number: int) -> np.random.Generator:
    """The random generator with this number for a split.

    Number 0 draws the lengths of all sequences. Number b + 1 draws the tokens of block b, counted
    from 0.
    """
    key = (int(split == "valid"), number)
    return np.random.default_rng(np.random.SeedSequence(corpus.seed, spawn_key=key))


def draw_lengths(corpus: Corpus, split: str, tokens: int) -> Iterator[np.ndarray]:
    """Yield the lengths of the sequences of each block, until they sum to at least `tokens`."""
    generator = stream(corpus, split, 0)
    least, most = corpus.lengths
    rows = max(LEAST_ROWS, BLOCK_TOKENS // most)
    while tokens > 0:
        lengths = generator.integers(least, most + 1, rows)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens) + 1]
        tokens -= int(lengths.sum())
        yield lengths


def make_blocks(
    corpus: Corpus, table: AliasTable, split: str, tokens: int, workers: int = 1
) -> Generator[np.ndarray, None, None]:
    """Yield the tokens of all blocks of a split, made by `workers` processes."""

    def make(block: tuple[int, np.ndarray]) -> np.ndarray:
        number, lengths = block
        generator = stream(corpus, split, number + 1)
        return GENERATORS[corpus.generator](generator, table, lengths, corpus)

    return in_order(make, enumerate(draw_lengths(corpus, split, tokens)), workers)


def write_corpus_split(
    split: SplitWriter, corpus: Corpus, table: AliasTable, tokens: int, workers: int
) -> None:
    """Write sequences until there are `tokens` tokens. They do not depend on `workers`."""
    name = split.directory.name
    blocks = make_blocks(corpus, table, name, tokens, workers)
    with Progress(f"making {name}", tokens, "tokens") as bar, closing(blocks):
        for lengths, block in zip(draw_lengths(corpus, name, tokens), blocks):  # noqa: B905
            split.append_ragged("tokens", block, lengths)
            bar.advance(len(block))


def write_corpus(
    output: Path,
    corpus: Corpus,
    vocab_size: int | None,
    frequencies: Store | None,
    origin: dict[str, Any],
    overwrite: bool = False,
    workers: int = 1,
) -> dict[str, dict[str, Any]]:
    """Write a store with the split `train`, and a split `valid` that is a twentieth as large.

    `frequencies` is a store whose training tokens give the distribution and the default vocabulary
    size, so that an id is as frequent here as there. Returns the number of rows and tokens of each
    split. Raises BadInput if the numbers contradict each other, and Failure if one of the `workers`
    dies.
    """
    counts = None
    size = vocab_size or (frequencies.vocab_size if frequencies else VOCABULARY)
    if frequencies is not None:
        counts = _counts_to_follow(frequencies, size)
        source = {"file": frequencies.path.name, "tokenizer": frequencies.fingerprint}
        origin = {**origin, "frequencies": source}
    if corpus.generator == "shuffle" and size < SPECIAL_IDS + 2 * (corpus.distinct or 0):
        raise BadInput(
            f"--vocab-size {size} is too small: --distinct {corpus.distinct} kinds of brackets "
            f"need {SPECIAL_IDS + 2 * (corpus.distinct or 0)}"
        )
    probabilities = weights(corpus, size, counts)
    table = alias_table(probabilities, closing_ids(corpus, probabilities))
    words = (f"w{i}" for i in range(SPECIAL_IDS, size))
    tokenizer = vocabularies.symbols(words, separated=True)
    with create_store(output, tokenizer, {"tokens": ""}, overwrite=overwrite) as store:
        sizes = {"train": corpus.tokens, "valid": math.ceil(corpus.tokens * VALID_SHARE)}
        for name, tokens in sizes.items():
            with store.split(name) as split:
                write_corpus_split(split, corpus, table, tokens, workers)
        rules = "empty stack: a pop is a push; start: empty; end: open tokens stay unmatched"
        made = asdict(corpus) | ({"rules": rules} if corpus.generator in BRACKETS else {})
        if corpus.partners == "equal":  # a store is the same as before there was a choice
            del made["partners"]
        store.finish("text", [], None, {**origin, "synthetic": made})
        return store.splits


def _counts_to_follow(frequencies: Store, size: int) -> np.ndarray:
    """How often each id occurs in a store's training split, special tokens excluded: (size,)."""
    if size < frequencies.vocab_size:
        raise BadInput(
            f"--vocab-size {size} is less than the {frequencies.vocab_size} of --frequencies; "
            "raise it or leave it out"
        )
    counts = np.pad(id_counts(frequencies, "train"), (0, size - frequencies.vocab_size))
    counts[list(frequencies.tokenizer().special.values())] = 0
    if lost := counts[:SPECIAL_IDS].sum():
        say(
            f"note: ids 0 to {SPECIAL_IDS - 1} are special tokens here, but ordinary ones in "
            f"{frequencies.path}, where they are {lost / counts.sum():.2%} of the tokens; they are "
            "left out",
            error=True,
        )
    if not counts[SPECIAL_IDS:].any():
        raise BadInput(
            f"--frequencies {frequencies.path} holds only special tokens; give another store"
        )
    return counts


ABOUTS = {
    "uniform": "Independent tokens, all with the same probability.",
    "zipf": "Independent tokens with the frequencies of a store, or 1 / rank.",
    "nesting": "Nested pairs of tokens, from a stack grammar.",
    "flat": "Pairs of tokens that need not nest.",
    "shuffle": "k-Shuffle Dyck: k kinds of brackets that need not nest. Some may still be open "
    "when a sequence ends.",
}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of `synthetic NAME`."""
    parser.set_defaults(generator=name, frequencies=None, push=0.4, depth=None, partners="equal")
    size = "30000" if name in WITHOUT_FREQUENCIES else "that of --frequencies, or else 30000"
    add = parser.add_argument
    add(
        "--tokens",
        type=whole_number(1),
        required=True,
        metavar="N",
        help="Tokens in the split train. The split valid gets 5 %% of that number in addition.",
    )
    add(
        "--lengths",
        type=length_range,
        default=(90, 120),
        metavar="LEAST:MOST",
        help="Tokens in a sequence, drawn uniformly from this range (default: 90:120).",
    )
    add(
        "--vocab-size",
        type=whole_number(6, MAX_PIECES),
        metavar="N",
        help=f"Size of the vocabulary, including five special ids (default: {size}).",
    )
    _add_distribution(parser, name)
    add(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="The seed of all random numbers (default: %(default)s).",
    )
    add(
        "--workers",
        type=whole_number(1, 4096),
        metavar="N",
        help="How many processes generate a large corpus (on macOS always one). The corpus does "
        "not depend on it (default: all cores).",
    )
    add_output(parser, "STORE")


def _add_distribution(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options that differ between generators: which tokens occur, and when."""
    add = parser.add_argument
    if name == "shuffle":
        add(
            "--distinct",
            type=whole_number(1),
            default=64,
            metavar="K",
            help="Kinds of brackets. The first K ids open them and the next K ids close them "
            "(default: %(default)s).",
        )
        add(
            "--depth",
            type=whole_number(1),
            default=8,
            metavar="N",
            help="The maximum number of brackets that are open at once (default: %(default)s).",
        )
    else:
        which = "the first ones of the vocabulary"
        if name not in WITHOUT_FREQUENCIES:
            which = f"the most frequent ones of --frequencies, or without it {which}"
        add(
            "--distinct",
            type=whole_number(1),
            metavar="N",
            help=f"How many distinct tokens occur: {which} (default: all).",
        )
    if name not in WITHOUT_FREQUENCIES:
        add(
            "--frequencies",
            type=Path,
            metavar="STORE",
            help="Draw tokens with their frequencies in this store, special tokens excluded "
            f"(default: {'1 / rank' if name == 'zipf' else 'all with the same probability'}).",
        )
    if name in BRACKETS:
        push = 0.5 if name == "shuffle" else 0.4
        add(
            "--push",
            type=fraction,
            default=push,
            metavar="P",
            help="The probability that a step opens a pair (default: %(default)s).",
        )
    if name in PARTNERED:
        add(
            "--partners",
            choices=("equal", "different"),
            default="equal",
            help="Whether the two tokens of a pair are equal, or two neighbours in the order of "
            "frequency: the first and the second, the third and the fourth. Then both occur nearly "
            "equally often, and of an odd number of tokens the rarest does not occur (default: "
            "%(default)s).",
        )


def run(arguments: argparse.Namespace) -> None:
    """Generate an artificial corpus."""
    read = [arguments.frequencies] if arguments.frequencies else []
    check_directory(arguments.output, arguments.overwrite, ("store.json",), *read)
    frequencies = open_stores(arguments.frequencies) if arguments.frequencies else None
    corpus = Corpus(
        arguments.generator,
        arguments.tokens,
        arguments.lengths,
        arguments.seed,
        arguments.distinct,
        arguments.push,
        arguments.depth,
        arguments.partners,
    )
    started = time.monotonic()
    workers = arguments.workers or usable_cores()
    written = write_corpus(
        arguments.output,
        corpus,
        arguments.vocab_size,
        frequencies,
        command_origin(),
        arguments.overwrite,
        workers,
    )
    say_written(arguments.output, written, started)
