"""`pairs`: a store of rows -> a store of pairs, for pre-training that also asks how two texts
belong together.

- next: does the second row follow the first in its document, or come from another (Devlin et al.
  2019, section 3.1)? The classes are `next` and `random`.
- order: two neighbours, as they stand or exchanged (Lan et al. 2020, section 3.1): `in_order`,
  `swapped`. Both need a store made with `text --documents`.
- family: are two proteins of one family (Min et al. 2019)? `different`, `same`. The families are
  the classes of the store.

Half of the pairs are of either class. Pairs are drawn by the seed; `--rounds N` draws N for each
row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from xformer.data.display import Progress
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Store, open_store
from xformer.data.writing import create_store

from ..arguments import add_output, origin
from ..arguments import check_output_directory as check_output
from ..arguments import say_written as summarise
from ..arguments import whole_number as number

ABOUT = "Draw pairs of rows: next sentence, sentence order, or same protein family."
CLASSES = {
    "next": ["next", "random"],
    "order": ["in_order", "swapped"],
    "family": ["different", "same"],
}
NEEDS = {"next": "group", "order": "group", "family": "label"}
BLOCK = 2**14  # pairs written at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pairs`."""
    add = parser.add_argument
    add("store", type=Path, metavar="STORE", help="The store whose rows are paired.")
    add(
        "--kind",
        choices=CLASSES,
        required=True,
        help="What the two rows of a pair may be: next "
        "or order, for documents; family, for proteins with their families.",
    )
    add(
        "--rounds",
        type=number(1),
        default=1,
        metavar="N",
        help="Pairs that each row begins (default: %(default)s).",
    )
    add(
        "--seed",
        type=number(0),
        default=0,
        metavar="N",
        help="Draws the pairs (default: %(default)s).",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Draw the pairs of every split."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    source, kind = open_store(arguments.store), arguments.kind
    column = NEEDS[kind]
    for name in source.splits:
        if column not in source.split(name).columns or (
            kind == "family" and source.kind != "class"
        ):
            how = "text --documents" if column == "group" else "task protein/family"
            raise BadInput(f"{arguments.store}: --kind {kind} needs a store made by `{how}`")
    started = time.monotonic()
    texts = ("tokens", "tokens_b")
    columns = {**dict.fromkeys(texts, ""), "label": "int64"}
    with create_store(
        arguments.output, source.tokenizer(), columns, texts, arguments.overwrite
    ) as store:
        for i, name in enumerate(source.splits):
            split = source.split(name)
            with (
                store.split(name) as out,
                Progress(f"pairing {name}", arguments.rounds * split.rows, "rows") as shown,
            ):
                for turn in range(arguments.rounds):
                    generator = np.random.default_rng([arguments.seed, i, turn])
                    first, second, label = DRAW[kind](generator, np.asarray(split.columns[column]))
                    if not len(first):
                        raise BadInput(f"{arguments.store}: no two rows of {name} make a pair")
                    for start in range(0, len(first), BLOCK):
                        part = slice(start, start + BLOCK)
                        for text, rows in zip(texts, (first[part], second[part]), strict=True):
                            out.append_ragged(text, *gather(split.columns["tokens"], rows))
                        out.append("label", label[part])
                        shown.advance(len(first[part]))
        made = {"kind": kind, "rounds": arguments.rounds, "seed": arguments.seed}
        record = {**origin(), "pairs": made, "store": _source(source)}
        store.finish("class", CLASSES[kind], "accuracy", record)
        written = store.splits
    summarise(arguments.output, written, started)


def _source(store: Store) -> dict[str, str]:
    return {"name": store.path.name, "key": store.key}


Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]  # first and second rows, and classes, (N,) each


def draw_next(generator: np.random.Generator, documents: np.ndarray) -> Drawn:
    """Rows and their successors, or rows of other documents. `documents` (rows,), ascending."""
    first = np.flatnonzero(documents[1:] == documents[:-1])
    label = generator.integers(2, size=len(first))
    # a row of another document: the own one's rows are left out of the range
    begin = np.searchsorted(documents, documents[first], side="left")
    size = np.searchsorted(documents, documents[first], side="right") - begin
    others = len(documents) - size
    label[others == 0] = 0
    other = (generator.random(len(first)) * others).astype(np.int64)
    other += np.where(other >= begin, size, 0)
    return first, np.where(label == 0, first + 1, np.minimum(other, len(documents) - 1)), label


def draw_order(generator: np.random.Generator, documents: np.ndarray) -> Drawn:
    """Neighbours, half of them exchanged."""
    first = np.flatnonzero(documents[1:] == documents[:-1])
    label = generator.integers(2, size=len(first))
    return first + label, first + 1 - label, label


def draw_family(generator: np.random.Generator, families: np.ndarray) -> Drawn:
    """Each row with another of its family, or with one of a family drawn evenly from the others.
    A row that is alone in its family is paired with another's."""
    order = np.argsort(families, kind="stable")
    _, family, sizes = np.unique(families, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        return (np.empty(0, np.int64),) * 3
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(families), np.int64)  # of each row within its family
    place[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    label = generator.integers(2, size=len(families))
    label[sizes[family] == 1] = 0
    # the others of the family come after the row itself, in a circle
    step = 1 + (generator.random(len(families)) * (sizes[family] - 1)).astype(np.int64)
    kin = (place + step) % sizes[family]
    foreign = (family + generator.integers(1, len(sizes), size=len(families))) % len(sizes)
    stranger = (generator.random(len(families)) * sizes[foreign]).astype(np.int64)
    other = np.where(label == 1, starts[family] + kin, starts[foreign] + stranger)
    return np.arange(len(families)), order[other], label


DRAW: dict[str, Callable[[np.random.Generator, np.ndarray], Drawn]] = {
    "next": draw_next,
    "order": draw_order,
    "family": draw_family,
}


def gather(column: Ragged, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values end to end, lengths) of some rows of a ragged column."""
    lengths = column.lengths(rows)
    skipped = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(column.offsets[rows] - skipped, lengths)
    return column.values[places], lengths
