"""Artificial corpora, written straight into a store (Chiang and Lee 2020, sections 3, 4.2 and 4.3;
Kao and Lee 2021, section 4.4.2).

- uniform: every token is drawn by itself, all alike.
- zipf: every token is drawn by itself from given frequencies.
- nesting: a stack of open tokens. With probability `push` a token is drawn, placed in the sequence
  and pushed; otherwise the top of the stack is popped and placed.
- flat: the same, but what is popped is any of the open tokens, all alike, so that every token is
  matched as before and the pairs cross.
- shuffle: k-Shuffle Dyck (Hu et al. 2025, arXiv 2502.19249). k kinds of brackets, all alike, open
  and close with tokens of their own; any open bracket may close next, so that the pairs cross. At
  most `depth` brackets are open: then one closes.

What the papers leave open is settled so: every sequence starts with an empty stack; on an empty
stack a pop is a push; a sequence ends when its length, drawn evenly from a range, is reached, and
tokens still on the stack then stay without their match.

Many sequences are made at once, one time step after the other, in blocks that have random numbers
of their own, so that processes can share the work and the corpus is the same whatever their number.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import vocabularies
from xformer.data.display import Progress
from xformer.data.errors import BadInput, Failure
from xformer.data.store import Store, open_store
from xformer.data.writing import SplitWriter, create_store

from ..arguments import (
    add_output,
    check_output_directory,
    fraction,
    length_range,
    origin,
    say_written,
    whole_number,
)
from ..stats import id_counts

BLOCK = 2**20  # tokens made at once, and
LEAST_ROWS = 2**11  # sequences, for every step of all of them costs some time of its own
PIECE = 2**14  # tokens drawn at once, so that what is between fits a cache
SPECIAL = 5  # ids 0 to 4
VALID = 0.05  # of the tokens asked for are written to the split `valid`, beside `train`
VOCABULARY = 30_000


@dataclass(frozen=True)
class Corpus:
    """What is to be made. `lengths` is the range of a sequence's length, both ends included;
    `distinct` is how many different tokens may occur (None: all), of shuffle how many may open;
    `push` belongs to nesting, flat and shuffle; `depth` (None: any) to shuffle."""

    generator: str
    tokens: int
    lengths: tuple[int, int]
    seed: int
    distinct: int | None = None
    push: float = 0.4
    depth: int | None = None


def weights(corpus: Corpus, vocab_size: int, counts: np.ndarray | None) -> np.ndarray:
    """How often each id is drawn, float64 (vocab_size,), adding up to 1; special ids never are.

    `counts` (one for each id) are the frequencies to follow. Without them tokens are all alike, or
    for "zipf" in proportion to 1 / rank. With `distinct`, the most frequent ids remain (Chiang and
    Lee 2020, section 4.3), which without counts are the first ones.
    """
    found = np.ones(vocab_size)
    if counts is not None:
        found = counts.astype(np.float64)
    elif corpus.generator == "zipf":
        found = 1.0 / np.maximum(np.arange(vocab_size) - SPECIAL + 1, 1)
    found[:SPECIAL] = 0
    if corpus.distinct is not None:
        if corpus.distinct > np.count_nonzero(found):
            raise BadInput(f"--distinct {corpus.distinct}: only {np.count_nonzero(found)} tokens")
        found[np.argsort(-found, kind="stable")[corpus.distinct :]] = 0
    return found / found.sum()


@dataclass(frozen=True)
class Alias:
    """Draws ids with given probabilities at one cost for all of them (Walker's alias method).

    There is a column of equal mass for every id, and more without an id up to a power of two, so
    that the last bits of a random number name a column. Where the number is below `keep`, of 2**64,
    the draw is the column itself, else the one that is `step` further in the type's arithmetic.
    """

    keep: np.ndarray  # uint64 (columns,)
    step: np.ndarray  # uint16 (columns,), or uint32 where there are more than 2**16

    def draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """`n` ids, of the type of `step`."""
        numbers = generator.integers(2**64, size=n, dtype=np.uint64)
        ids = numbers.astype(self.step.dtype) & self.step.dtype.type(len(self.step) - 1)
        ids += self.step.take(ids) * (numbers >= self.keep.take(ids))
        return ids


def alias(probabilities: np.ndarray) -> Alias:
    """The table of probabilities, float64 (vocab_size,), that add up to 1."""
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
    # below 2**64, for a column that keeps everything has itself as the other
    bounds = (keep * (2**64 - 2**11)).astype(np.uint64)
    steps = other - np.arange(columns)
    return Alias(bounds, steps.astype(np.uint16 if columns <= 2**16 else np.uint32))


def independent(
    generator: np.random.Generator, table: Alias, lengths: np.ndarray, corpus: Corpus
) -> np.ndarray:
    """Sequences of these lengths, end to end, of tokens drawn one by one."""
    made = np.empty(int(lengths.sum()), table.step.dtype)
    for start in range(0, len(made), PIECE):
        piece = made[start : start + PIECE]
        piece[:] = table.draw(generator, len(piece))
    return made


def parentheses(
    generator: np.random.Generator, table: Alias, lengths: np.ndarray, corpus: Corpus
) -> np.ndarray:
    """Sequences of these lengths, end to end, of the stack grammar: nesting, flat or shuffle.

    All sequences take a step at once, the longest ones first in line, so that those which still go
    on are the first ones. Their stacks lie level by level, and in a level one slot for each
    sequence, so that what is in use is small and stays in the cache.
    """
    flat, bound = corpus.generator != "nesting", int(corpus.push * 2**32)
    shift = corpus.distinct or 0 if corpus.generator == "shuffle" else 0  # opening to closing id
    order = np.argsort(-lengths, kind="stable")
    rows, steps = len(lengths), int(lengths.max())
    active = rows - np.cumsum(np.bincount(lengths))  # sequences longer than 0, 1, 2, ...
    made = np.empty(int(lengths.sum()), table.step.dtype)
    place = (np.cumsum(lengths) - lengths)[order]  # of each sequence's first token
    stack = np.empty((steps + 1) * rows, table.step.dtype)
    free = np.arange(rows)  # the lowest free slot of each sequence
    for step in range(steps):
        number = int(active[step])
        halves = generator.integers(2**64, size=(number + 1) // 2, dtype=np.uint64)
        drawn = halves.view(np.uint32)[:number]
        pushed = (drawn < bound) | (free[:number] < rows)
        if corpus.depth is not None:
            pushed &= free[:number] < corpus.depth * rows
        push, pop = np.flatnonzero(pushed), np.flatnonzero(~pushed)
        slot = free.take(push)
        made[place.take(push) + step] = stack[slot] = table.draw(generator, len(push))
        free[push] = slot + rows
        top = free.take(pop) - rows
        free[pop] = slot = top
        if flat:
            # The number that decided on a pop also chooses the open token. It is uniform from
            # `bound` to 2**32, or from 0 to `bound` if the depth forced the pop. The token at the
            # top of the stack then moves to the slot of the chosen one.
            value = drawn.take(pop).astype(np.float64)
            share = np.where(
                value < bound, value / max(bound, 1), (value - bound) / (2**32 - bound)
            )
            slot = (share * (top // rows + 1)).astype(np.int64) * rows + pop
        made[place.take(pop) + step] = stack.take(slot) + made.dtype.type(shift)
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


def stream(corpus: Corpus, split: str, number: int) -> np.random.Generator:
    """The random numbers of one block of a split (from 1), or of all its lengths (0)."""
    key = (int(split == "valid"), number)
    return np.random.default_rng(np.random.SeedSequence(corpus.seed, spawn_key=key))


def draw_lengths(corpus: Corpus, split: str, tokens: int) -> Iterator[np.ndarray]:
    """The sequences' lengths, block by block, until there are `tokens` (the last one is whole)."""
    generator = stream(corpus, split, 0)
    least, most = corpus.lengths
    rows = max(LEAST_ROWS, BLOCK // most)
    while tokens > 0:
        lengths = generator.integers(least, most + 1, rows)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens) + 1]
        tokens -= int(lengths.sum())
        yield lengths


def make_blocks(
    corpus: Corpus, table: Alias, split: str, tokens: int, first: int = 0, every: int = 1
) -> Generator[np.ndarray, None, None]:
    """The tokens of the blocks `first`, `first + every`, ... of a split, or of all of them."""
    for block, lengths in enumerate(draw_lengths(corpus, split, tokens)):
        if block % every == first:
            generator = stream(corpus, split, block + 1)
            yield GENERATORS[corpus.generator](generator, table, lengths, corpus)


def make_in_processes(
    corpus: Corpus, table: Alias, split: str, tokens: int, workers: int
) -> Generator[np.ndarray, None, None]:
    """As `make_blocks` for all blocks, which the processes make in turn.

    A worker waits until its block is wanted, so that memory holds two blocks of each at most, and
    it ends when nobody reads. Raises Failure when a worker has died.
    """
    fork = multiprocessing.get_context("fork")
    readers: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for first in range(workers):
            reader, writer = fork.Pipe(duplex=False)
            readers.append(reader)
            blocks = make_blocks(corpus, table, split, tokens, first, workers)
            process: BaseProcess = fork.Process(
                target=_work, args=(blocks, writer, readers), daemon=True
            )
            process.start()
            processes.append(process)
            writer.close()
        for reader, process in cycle(zip(readers, processes, strict=True)):
            try:
                data = reader.recv_bytes()
            except (EOFError, OSError):
                process.join()
                raise Failure(
                    f"a worker process ended with status {process.exitcode} before its work was "
                    "done; with --workers 1 there are none"
                ) from None
            yield np.frombuffer(data, table.step.dtype)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for reader in readers:
            reader.close()


def _work(blocks: Iterator[np.ndarray], writer: Connection, readers: list[Connection]) -> None:
    """Send the blocks; end silently when nobody reads any more, as when the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for reader in readers:  # held open here, it would look as if somebody read
        reader.close()
    for block in blocks:
        writer.send_bytes(block)  # type: ignore[arg-type]


def write_split(
    split: SplitWriter, corpus: Corpus, table: Alias, tokens: int, workers: int
) -> None:
    """Sequences until there are `tokens` tokens, the same whatever the number of workers."""
    name = split.directory.name
    workers = min(workers, math.ceil(tokens / BLOCK))  # a small corpus is faster without
    if workers > 1:
        blocks = make_in_processes(corpus, table, name, tokens, workers)
    else:
        blocks = make_blocks(corpus, table, name, tokens)
    with Progress(f"making {name}", tokens, "tokens") as shown, closing(blocks):
        for lengths, block in zip(draw_lengths(corpus, name, tokens), blocks):  # noqa: B905
            split.append_ragged("tokens", block, lengths)
            shown.advance(len(block))


def write_store(
    output: Path,
    corpus: Corpus,
    vocab_size: int | None,
    frequencies: Store | None,
    origin: dict[str, Any],
    overwrite: bool = False,
    workers: int = 1,
) -> dict[str, dict[str, Any]]:
    """Write `train` with the tokens asked for, and `valid` with a twentieth of that beside it.

    `frequencies` is a store whose training tokens give the distribution and the default vocabulary
    size, so that equal ids are equally frequent. Returns rows and tokens of every split; raises
    BadInput where the numbers contradict each other, Failure when one of the `workers` dies.
    """
    counts = None
    size = vocab_size or (frequencies.vocab_size if frequencies else VOCABULARY)
    if frequencies is not None:
        if size < frequencies.vocab_size:
            raise BadInput(
                f"--vocab-size {size} is less than the {frequencies.vocab_size} of --frequencies"
            )
        counts = np.pad(id_counts(frequencies, "train"), (0, size - frequencies.vocab_size))
        counts[list(frequencies.tokenizer().special.values())] = 0
        if not counts[SPECIAL:].any():
            raise BadInput(f"{frequencies.path} holds nothing but special tokens")
        source = {"file": frequencies.path.name, "tokenizer": frequencies.fingerprint}
        origin = {**origin, "frequencies": source}
    if corpus.generator == "shuffle" and size < SPECIAL + 2 * (corpus.distinct or 0):
        raise BadInput(
            f"--vocab-size {size} has no room for --distinct {corpus.distinct} kinds of brackets; "
            f"they need {SPECIAL + 2 * (corpus.distinct or 0)}"
        )
    if size <= SPECIAL:
        raise BadInput(f"--vocab-size {size} leaves nothing beside the {SPECIAL} special tokens")
    table = alias(weights(corpus, size, counts))
    words = (f"w{i}" for i in range(SPECIAL, size))
    tokenizer = vocabularies.symbols(words, separated=True)
    with create_store(output, tokenizer, {"tokens": ""}, overwrite=overwrite) as store:
        for name, tokens in (("train", corpus.tokens), ("valid", math.ceil(corpus.tokens * VALID))):
            with store.split(name) as split:
                write_split(split, corpus, table, tokens, workers)
        rules = "empty stack: a pop is a push; start: empty; end: open tokens stay unmatched"
        made = asdict(corpus) | ({"rules": rules} if corpus.generator in BRACKETS else {})
        store.finish("text", [], None, {**origin, "synthetic": made})
        return store.splits


ABOUTS = {
    "uniform": "Tokens drawn one by one, all alike.",
    "zipf": "Tokens drawn one by one by frequency: a store's, or 1 / rank.",
    "nesting": "A stack grammar: nested pairs of equal tokens.",
    "flat": "Pairs of equal tokens that need not nest.",
    "shuffle": "k-Shuffle Dyck: brackets of k kinds that need not nest. A sequence may end while "
    "some are open.",
}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of `synthetic NAME`."""
    parser.set_defaults(generator=name, frequencies=None, push=0.4, depth=None)
    add = parser.add_argument
    add(
        "--tokens",
        type=whole_number(1),
        required=True,
        metavar="N",
        help="Tokens of the split train; a twentieth more makes the split valid.",
    )
    add(
        "--lengths",
        type=length_range,
        default=(90, 120),
        metavar="LEAST:MOST",
        help="Tokens in a sequence, drawn evenly (default: 90:120).",
    )
    add(
        "--vocab-size",
        type=whole_number(6),
        metavar="N",
        help="Ids of the vocabulary, five special "
        "ones included (default: that of --frequencies, or 30000).",
    )
    if name == "shuffle":
        add(
            "--distinct",
            type=whole_number(1),
            default=64,
            metavar="K",
            help="Kinds of brackets: the "
            "first K ids open them, the next K close them (default: %(default)s).",
        )
        add(
            "--depth",
            type=whole_number(1),
            default=8,
            metavar="N",
            help="Brackets that are open at once, at most (default: %(default)s).",
        )
    else:
        add(
            "--distinct",
            type=whole_number(1),
            metavar="N",
            help="Different tokens that occur; the most frequent, else the first (default: all).",
        )
    add(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="Draws the corpus (default: %(default)s).",
    )
    if name not in ("uniform", "shuffle"):
        add(
            "--frequencies",
            type=Path,
            metavar="STORE",
            help="Draw tokens as often as they "
            "occur in this store, never its special ones (default: "
            f"{'1 / rank' if name == 'zipf' else 'all alike'}).",
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
    add(
        "--workers",
        type=whole_number(1, 4096),
        metavar="N",
        help="Processes that make a large corpus, "
        "which is the same whatever their number (default: all cores).",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Make an artificial corpus."""
    check_output_directory(arguments.output, arguments.overwrite, "store.json")
    frequencies = open_store(arguments.frequencies) if arguments.frequencies else None
    corpus = Corpus(
        arguments.generator,
        arguments.tokens,
        arguments.lengths,
        arguments.seed,
        arguments.distinct,
        arguments.push,
        arguments.depth,
    )
    started = time.monotonic()
    workers = arguments.workers or len(os.sched_getaffinity(0))
    written = write_store(
        arguments.output,
        corpus,
        arguments.vocab_size,
        frequencies,
        origin(),
        arguments.overwrite,
        workers,
    )
    say_written(arguments.output, written, started)
