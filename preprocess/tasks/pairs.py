"""`pairs`: a store of rows -> a store of pairs, for pre-training that also predicts how two texts
are related.

- next: does the second row follow the first in its document, or is it from another document (Devlin
  et al. 2019, section 3.1)? The classes are `next` and `random`.
- order: are two neighbouring rows in order or swapped (Lan et al. 2020, section 3.1)? The classes
  are `in_order` and `swapped`. Like `next` it needs a store made with `text --documents`.
- family: are two proteins from the same family (Min et al. 2019)? The classes are `different` and
  `same`. The families are the classes of the store.

Each class has about half of the pairs. The seed fixes the pairs; `--rounds N` draws N for each row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xformer.data.arguments import whole_number
from xformer.data.display import Progress
from xformer.data.errors import BadInput
from xformer.data.joined import open_stores
from xformer.data.outputs import check_directory
from xformer.data.store import Ragged
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, command_origin, say_written

ABOUT = "Draw pairs of rows: next sentence, sentence order, or same protein family."
CLASSES = {
    "next": ["next", "random"],
    "order": ["in_order", "swapped"],
    "family": ["different", "same"],
}
# the kind of store that each kind of pair is drawn from, and the column that it looks at
NEEDS = {"next": ("text", "group"), "order": ("text", "group"), "family": ("class", "label")}
TEXTS = ("tokens", "tokens_b")  # the columns of the two rows
BLOCK = 2**14  # pairs written at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pairs`."""
    add = parser.add_argument
    add("store", type=Path, metavar="STORE", help="The store whose rows are paired.")
    add(
        "--kind",
        choices=CLASSES,
        required=True,
        help="How the two rows of a pair are related. next: the second follows the first in its "
        "document, or not. order: two neighbours are in order, or swapped. family: two proteins "
        "are from the same family, or not.",
    )
    add(
        "--rounds",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="How many pairs are drawn for each row (default: %(default)s).",
    )
    add(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="The seed that decides the pairs (default: %(default)s).",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Draw the pairs of every split of a store, and write them."""
    check_directory(arguments.output, arguments.overwrite, ("store.json",), arguments.store)
    source, kind = open_stores(arguments.store), arguments.kind
    store_kind, needed = NEEDS[kind]
    for name in source.splits:
        if source.kind != store_kind or needed not in source.split(name).columns:
            command = "text --documents" if needed == "group" else "task protein/family"
            raise BadInput(f"{arguments.store}: --kind {kind} needs a store made by `{command}`")
    started = time.monotonic()
    columns = {**dict.fromkeys(TEXTS, ""), "label": "int64"}
    with create_store(
        arguments.output, source.tokenizer(), columns, TEXTS, arguments.overwrite
    ) as store:
        for i, name in enumerate(source.splits):
            split = source.split(name)
            total = arguments.rounds * split.rows
            with store.split(name) as out, Progress(f"pairing {name}", total, "rows") as progress:
                for turn in range(arguments.rounds):
                    generator = np.random.default_rng([arguments.seed, i, turn])
                    pairs = DRAW[kind](generator, np.asarray(split.columns[needed]))
                    if not len(pairs.first):
                        needs = "a document of several rows (a smaller --max-tokens makes more)"
                        needs = "rows of two families" if kind == "family" else needs
                        what = f"no two rows of {name} make a pair; it needs {needs}"
                        raise BadInput(f"{arguments.store}: {what}")
                    _write(pairs, split.columns["tokens"], out, progress)
        options = {"kind": kind, "rounds": arguments.rounds, "seed": arguments.seed}
        read_from = {"name": source.path.name, "key": source.key}
        record = {**command_origin(), "pairs": options, "store": read_from}
        store.finish("class", CLASSES[kind], "accuracy", record)
        written = store.splits
    say_written(arguments.output, written, started)


class DrawnPairs(NamedTuple):
    """The numbers of the first and of the second rows, and the classes, (pairs,) each."""

    first: np.ndarray
    second: np.ndarray
    label: np.ndarray


def _write(pairs: DrawnPairs, tokens: Ragged, out: SplitWriter, progress: Progress) -> None:
    """Append pairs of the rows `tokens` to a split."""
    for start in range(0, len(pairs.first), BLOCK):
        part = slice(start, start + BLOCK)
        for column, rows in zip(TEXTS, (pairs.first[part], pairs.second[part]), strict=True):
            out.append_ragged(column, *gather(tokens, rows))
        out.append("label", pairs.label[part])
        progress.advance(len(pairs.first[part]))


def draw_next(generator: np.random.Generator, documents: np.ndarray) -> DrawnPairs:
    """Pair each row with the next row of its document, or with a row of another document.

    `documents` (rows,) is the document of each row, ascending.
    """
    first = np.flatnonzero(documents[1:] == documents[:-1])
    label = generator.integers(2, size=len(first))
    begin = np.searchsorted(documents, documents[first], side="left")
    size = np.searchsorted(documents, documents[first], side="right") - begin
    others = len(documents) - size
    label[others == 0] = 0
    # the drawn number counts only the rows of other documents; step over the own document
    other = (generator.random(len(first)) * others).astype(np.int64)
    other += np.where(other >= begin, size, 0)
    second = np.where(label == 0, first + 1, np.minimum(other, len(documents) - 1))
    return DrawnPairs(first, second, label)


def draw_order(generator: np.random.Generator, documents: np.ndarray) -> DrawnPairs:
    """Pair each row with the next row of its document. Half of the pairs are swapped."""
    first = np.flatnonzero(documents[1:] == documents[:-1])
    label = generator.integers(2, size=len(first))
    return DrawnPairs(first + label, first + 1 - label, label)


def draw_family(generator: np.random.Generator, families: np.ndarray) -> DrawnPairs:
    """Pair each row with another row of its family, or with a row of another family.

    Every other family is equally likely. A row that is alone in its family is paired with a row of
    another. A row whose family is not known (UNLABELLED or UNSEEN) is in no pair.
    """
    known = np.flatnonzero(families >= 0)
    families = families[known]
    order = np.argsort(families, kind="stable")  # rows, family by family
    _, family, sizes = np.unique(families, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        return DrawnPairs(*(np.empty(0, np.int64),) * 3)
    starts = np.cumsum(sizes) - sizes  # where each family begins in `order`
    place = np.empty(len(families), np.int64)  # of each row within its family
    place[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    label = generator.integers(2, size=len(families))
    label[sizes[family] == 1] = 0
    # 1 to size - 1 steps around the family's circle never lead back to the row itself
    step = 1 + (generator.random(len(families)) * (sizes[family] - 1)).astype(np.int64)
    same = (place + step) % sizes[family]
    other_family = (family + generator.integers(1, len(sizes), size=len(families))) % len(sizes)
    different = (generator.random(len(families)) * sizes[other_family]).astype(np.int64)
    second = np.where(label == 1, starts[family] + same, starts[other_family] + different)
    return DrawnPairs(known, known[order[second]], label)


DRAW: dict[str, Callable[[np.random.Generator, np.ndarray], DrawnPairs]] = {
    "next": draw_next,
    "order": draw_order,
    "family": draw_family,
}


def gather(column: Ragged, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of some rows of a ragged column, concatenated, and the length of each row."""
    lengths = column.lengths(rows)
    before = np.cumsum(lengths) - lengths  # values of earlier rows in the result
    places = np.arange(int(lengths.sum())) + np.repeat(column.offsets[rows] - before, lengths)
    return column.values[places], lengths
