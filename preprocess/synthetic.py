"""Artificial corpora, written straight into a store (Chiang and Lee 2020, sections 3, 4.2 and 4.3;
Kao and Lee 2021, section 4.4.2).

- uniform: every token is drawn by itself, all alike.
- zipf: every token is drawn by itself from given frequencies.
- nesting: a stack of open tokens. With probability `push` a token is drawn, placed in the sequence
  and pushed; otherwise the top of the stack is popped and placed.
- flat: the same, but what is popped is any of the open tokens, all alike, so that every token is
  matched as before and the pairs cross.

What the papers leave open is settled so: every sequence starts with an empty stack; on an empty
stack a pop is a push; a sequence ends when its length, drawn evenly from a range, is reached, and
tokens still on the stack then stay without their match.

Many sequences are made at once, one time step after the other, in arrays of (time, sequence).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.arguments import (
    add_output,
    check_output,
    length_range,
    number,
    origin,
    share,
    summarise,
)
from preprocess.progress import progress
from preprocess.stats import id_counts
from xformer.data import tokenizers
from xformer.data.errors import BadInput
from xformer.data.store import SplitWriter, Store, create_store, open_store

BLOCK = 2**20  # tokens made at once
SPECIAL = 5  # ids 0 to 4
VALID = 0.05  # of the tokens asked for are written to the split `valid`, beside `train`
VOCABULARY = 30_000

Sampler = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Corpus:
    """What is to be made. `lengths` is the range of a sequence's length, both ends included;
    `distinct` is how many different tokens may occur (None: all); `push` belongs to nesting and
    flat."""

    generator: str
    tokens: int
    lengths: tuple[int, int]
    seed: int
    distinct: int | None = None
    push: float = 0.4


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


def alias_sampler(probabilities: np.ndarray) -> Sampler:
    """A function (generator, n) -> n ids with these probabilities, uint32, at one cost for all.

    Walker's alias method: the ids that can occur share columns of equal mass, at most two a column.
    """
    ids = np.flatnonzero(probabilities)
    mass = probabilities[ids] * len(ids)
    keep, other = np.ones(len(ids), np.float32), np.arange(len(ids))
    small = [i for i in range(len(ids)) if mass[i] < 1]
    large = [i for i in range(len(ids)) if mass[i] >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        keep[low], other[low] = mass[low], high
        mass[high] -= 1 - mass[low]
        if mass[high] < 1:
            small.append(large.pop())
    first, second = ids.astype(np.uint32), ids[other].astype(np.uint32)

    def sample(generator: np.random.Generator, n: int) -> np.ndarray:
        column = generator.integers(len(first), size=n, dtype=np.uint32)
        if (keep == 1).all():
            return first[column]
        stay = generator.random(n, np.float32) < keep[column]
        return np.where(stay, first[column], second[column])

    return sample


def independent(
    generator: np.random.Generator, sample: Sampler, steps: int, rows: int, corpus: Corpus
) -> np.ndarray:
    """(steps, rows) tokens drawn one by one."""
    return sample(generator, steps * rows).reshape(steps, rows)


def parentheses(
    generator: np.random.Generator, sample: Sampler, steps: int, rows: int, corpus: Corpus
) -> np.ndarray:
    """(steps, rows) tokens of the stack grammar, nesting or flat."""
    flat = corpus.generator == "flat"
    out = np.empty((steps, rows), np.uint32)
    stack = np.empty((steps + 1, rows), np.uint32)
    depth = np.zeros(rows, np.int64)  # open tokens of each sequence
    every = np.arange(rows)
    for step in range(steps):
        push = generator.random(rows, np.float32) < corpus.push
        push |= depth == 0
        new = np.flatnonzero(push)
        stack[depth[new], new] = sample(generator, len(new))
        top = depth - ~push  # where the token to place lies
        if flat:
            # the popped token changes places with one of the open ones
            pop = np.flatnonzero(~push)
            chosen = (generator.random(len(pop)) * depth[pop]).astype(np.int64)
            last = stack[top[pop], pop]
            stack[top[pop], pop] = stack[chosen, pop]
            stack[chosen, pop] = last
        out[step] = stack[top, every]
        depth = top + push
    return out


GENERATORS = {
    "uniform": independent,
    "zipf": independent,
    "nesting": parentheses,
    "flat": parentheses,
}


def write_split(split: SplitWriter, corpus: Corpus, sample: Sampler, tokens: int) -> None:
    """Sequences until there are `tokens` tokens (the last one is whole)."""
    generator = np.random.default_rng([corpus.seed, split.directory.name == "valid"])
    least, most = corpus.lengths
    rows = max(64, BLOCK // most)
    left = tokens
    with progress(f"making {split.directory.name}", tokens, "tokens") as shown:
        while left > 0:
            made = GENERATORS[corpus.generator](generator, sample, most, rows, corpus).T
            lengths = generator.integers(least, most + 1, rows)
            enough = np.searchsorted(np.cumsum(lengths), left) + 1
            lengths = lengths[:enough]
            inside = np.arange(most) < lengths[:, None]
            split.append_ragged("tokens", made[:enough][inside], lengths)
            left -= int(lengths.sum())
            shown.add(int(lengths.sum()))


def write_store(
    output: Path,
    corpus: Corpus,
    vocab_size: int | None,
    frequencies: Store | None,
    origin: dict[str, Any],
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Write `train` with the tokens asked for, and `valid` with a twentieth of that beside it.

    `frequencies` is a store whose training tokens give the distribution and the default vocabulary
    size, so that equal ids are equally frequent. Returns rows and tokens of every split; raises
    BadInput where the numbers contradict each other.
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
    if size <= SPECIAL:
        raise BadInput(f"--vocab-size {size} leaves nothing beside the {SPECIAL} special tokens")
    sample = alias_sampler(weights(corpus, size, counts))
    words = (f"w{i}" for i in range(SPECIAL, size))
    tokenizer = tokenizers.symbols(words, separated=True)
    with create_store(output, tokenizer, {"tokens": ""}, overwrite=overwrite) as store:
        for name, tokens in (("train", corpus.tokens), ("valid", math.ceil(corpus.tokens * VALID))):
            with store.split(name) as split:
                write_split(split, corpus, sample, tokens)
        rules = "empty stack: a pop is a push; start: empty; end: open tokens stay unmatched"
        made = asdict(corpus) | (
            {"rules": rules} if corpus.generator in ("nesting", "flat") else {}
        )
        store.finish("text", [], None, {**origin, "synthetic": made})
        return store.splits


ABOUTS = {
    "uniform": "Tokens drawn one by one, all alike.",
    "zipf": "Tokens drawn one by one by frequency: a store's, or 1 / rank.",
    "nesting": "A stack grammar: nested pairs of equal tokens.",
    "flat": "Pairs of equal tokens that need not nest.",
}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of `synthetic NAME`."""
    parser.set_defaults(generator=name, frequencies=None, push=0.4)
    add = parser.add_argument
    add("--tokens", type=number(1), required=True, metavar="N",
        help="Tokens of the split train; a twentieth more makes the split valid.")  # fmt: skip
    add("--lengths", type=length_range, default=(90, 120), metavar="LEAST:MOST",
        help="Tokens in a sequence, drawn evenly (default: 90:120).")  # fmt: skip
    add("--vocab-size", type=number(6), metavar="N", help="Ids of the vocabulary, five special "
        "ones included (default: that of --frequencies, or 30000).")  # fmt: skip
    add("--distinct", type=number(1), metavar="N", help="Different tokens that occur; the most "
        "frequent, else the first (default: all).")  # fmt: skip
    add("--seed", type=number(0), default=0, metavar="N",
        help="Draws the corpus (default: %(default)s).")  # fmt: skip
    if name != "uniform":
        add("--frequencies", type=Path, metavar="STORE", help="Draw tokens as often as they "
            "occur in this store, never its special ones (default: "
            f"{'1 / rank' if name == 'zipf' else 'all alike'}).")  # fmt: skip
    if name in ("nesting", "flat"):
        add("--push", type=share, default=0.4, metavar="P", help="The probability that a step "
            "opens a pair (default: %(default)s).")  # fmt: skip
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Make an artificial corpus."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    frequencies = open_store(arguments.frequencies) if arguments.frequencies else None
    corpus = Corpus(
        arguments.generator, arguments.tokens, arguments.lengths, arguments.seed,
        arguments.distinct, arguments.push,
    )  # fmt: skip
    started = time.monotonic()
    written = write_store(
        arguments.output, corpus, arguments.vocab_size, frequencies, origin(), arguments.overwrite
    )
    summarise(arguments.output, written, started)
