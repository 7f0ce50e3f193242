"""What is in a store: lengths, ids, entropies, labels; and whether its files are undamaged."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.display import Progress, say
from xformer.data.errors import BadInput, Failure
from xformer.data.files import BLOCK as CHECKED
from xformer.data.files import write_json
from xformer.data.store import TEXTS, Ragged, Store, open_store
from xformer.data.tags import IGNORED

from . import stats_figure
from .arguments import add_json, check_file

BLOCK = 2**22  # values read at once


def id_counts(
    store: Store, split: str, read: Callable[[int], None] = lambda tokens: None
) -> np.ndarray:
    """How often every id occurs in a split, int64 (vocab_size,), over all its texts.

    `read` is told of every block's tokens.
    """
    counts = np.zeros(store.vocab_size, np.int64)
    for column in texts(store, split).values():
        for block in _blocks(column.values):
            if len(block) and block.max() >= store.vocab_size:
                raise BadInput(f"{store.path}: an id is beyond the vocabulary: it is damaged")
            counts += np.bincount(block, minlength=store.vocab_size)
            read(len(block))
    return counts


def texts(store: Store, split: str) -> dict[str, Ragged]:
    """The columns of ids; other ragged columns hold something else, such as characters."""
    columns = store.split(split).columns
    return {name: columns[name] for name in TEXTS if name in columns}


def row_lengths(columns: Sequence[Ragged]) -> Counter[int]:
    """How many rows have each number of tokens, in all these columns together."""
    found: Counter[int] = Counter()
    for start in range(0, len(columns[0]), BLOCK):
        lengths = sum(np.diff(column.offsets[start : start + BLOCK + 1]) for column in columns)
        values, counts = np.unique(lengths, return_counts=True)
        found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return found


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), BLOCK):
        yield values[start : start + BLOCK]


def entropy(counts: np.ndarray) -> float:
    """Of the ids' own relative frequencies, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def cross_entropy(counts: np.ndarray, model: np.ndarray) -> float:
    """Of one split's ids under another's frequencies with one added to every count, in nats.

    It is what a model that knows the frequencies and no context would reach.
    """
    log_shares = np.log((model + 1) / (model.sum() + len(model)))
    return float(-(counts * log_shares).sum() / counts.sum())


def _summary(found: Counter[int]) -> dict[str, float]:
    values = np.array(sorted(found))
    counts = np.array([found[value] for value in values])
    ends = np.cumsum(counts)
    rows = int(ends[-1])
    middle = [
        values[np.searchsorted(ends, place, side="right")] for place in ((rows - 1) // 2, rows // 2)
    ]
    return {
        "mean": int(values @ counts) / rows,
        "min": int(values[0]),
        "median": float(np.mean(middle)),
        "max": int(values[-1]),
    }


def _labels(store: Store, values: np.ndarray) -> dict[str, Any]:
    if store.kind in ("class", "tag", "choice"):
        labels = store.labels
        if store.kind == "choice":  # all rows of a question have its label
            labels, values = [f"ending {i}" for i in range(store.choices)], values[:: store.choices]
        names = ["(not in training)", "(none)", *labels]  # -2, -1, 0, ...
        counts = np.zeros(len(names), np.int64)
        for block in _blocks(values):
            if len(block) and (block.min() < IGNORED or block.max() >= len(labels)):
                raise BadInput(f"{store.path}: a label is none of the classes: it is damaged")
            counts += np.bincount(block[block != IGNORED] + 2, minlength=len(names))
        found = dict(zip(names, counts.tolist(), strict=True))
        named = {name: found[name] for name in labels}
        return named | {
            name: found[name] for name in ("(none)", "(not in training)") if found[name]
        }
    if store.kind == "span":  # first and last token, -1 where there is no answer
        answered = sum(int((block[:, 0] >= 0).sum()) for block in _blocks(values))
        return {"answered": answered, "(none)": len(values) - answered}
    return _scores(values)


def _scores(values: np.ndarray) -> dict[str, Any]:
    number, total, least, most = 0, 0.0, np.inf, -np.inf
    for block in _blocks(values):
        scores = block[~np.isnan(block)].astype(np.float64)
        if len(scores):
            number, total = number + len(scores), total + scores.sum()
            least, most = min(least, scores.min()), max(most, scores.max())
    found: dict[str, Any] = {"(none)": len(values) - number} if number < len(values) else {}
    if number:
        mean = total / number
        squares = sum(
            np.nansum(np.square(block - mean, dtype=np.float64)) for block in _blocks(values)
        )
        found |= {"mean": float(mean), "std": float(np.sqrt(squares / number))}
        found |= {"min": float(least), "max": float(most)}
    return found


@dataclass(frozen=True)
class Survey:
    """What one reading of a split finds: `counts` of ids, rows by the tokens in them (each text,
    and all its texts together), labels."""

    rows: int
    counts: np.ndarray
    lengths: dict[str, Counter[int]]
    together: Counter[int]
    labels: dict[str, Any] | None


def survey(store: Store) -> dict[str, Survey]:
    """Read every split once, in blocks: memory does not grow with the store."""
    columns = {name: texts(store, name) for name in store.splits}
    total = sum(len(column.values) for split in columns.values() for column in split.values())
    found = {}
    with Progress("counting", total, "tokens") as shown:
        for name in store.splits:
            split = store.split(name)
            lengths = {column: row_lengths([values]) for column, values in columns[name].items()}
            together = row_lengths(list(columns[name].values()))
            tags = split.columns.get("labels")  # one a word
            label = split.columns.get("label") if tags is None else tags.values
            labels = None if label is None else _labels(store, label)
            counts = id_counts(store, name, shown.advance)
            found[name] = Survey(split.rows, counts, lengths, together, labels)
    return found


def describe(store: Store, surveys: dict[str, Survey] | None = None) -> dict[str, Any]:
    """Rows, tokens, lengths, ids, entropies and labels of every split."""
    surveys = surveys or survey(store)
    train = surveys["train"].counts if "train" in surveys else None
    unknown = store.tokenizer().special["unk"]
    splits: dict[str, Any] = {}
    for name, split in surveys.items():
        counts, tokens = split.counts, int(split.counts.sum())
        found: dict[str, Any] = {"rows": split.rows, "tokens": tokens}
        if store.kind == "choice":
            found["questions"] = split.rows // store.choices
        if (words := store.split(name).words) is not None:
            found["words"] = words
        found["lengths"] = {column: _summary(rows) for column, rows in split.lengths.items()}
        if tokens:
            found["distinct_ids"] = int(np.count_nonzero(counts))
            found["unknown_share"] = float(counts[unknown] / tokens)
            found["unigram_entropy"] = entropy(counts)
            found["unigram_perplexity"] = float(np.exp(found["unigram_entropy"]))
            if train is not None:
                found["cross_entropy_under_train"] = cross_entropy(counts, train)
        if split.labels is not None:
            found["labels"] = split.labels
        splits[name] = found
    return {
        "store": store.path.resolve().name,
        "kind": store.kind,
        **({"choices": store.choices} if store.kind == "choice" else {}),
        "metric": store.metric,
        "vocab_size": store.vocab_size,
        "splits": splits,
    }


def show(found: dict[str, Any]) -> None:
    """Print a description, a block of lines a split."""
    metric = f", metric {found['metric']}" if found["metric"] else ""
    kind = f"{found['kind']} of {found['choices']}" if "choices" in found else found["kind"]
    say(f"{found['store']}: {kind}{metric}, vocabulary {found['vocab_size']:,}")
    for name, split in found["splits"].items():
        words = f", {split['words']:,} words" if "words" in split else ""
        questions = f"{split['questions']:,} questions, " if "questions" in split else ""
        say(f"{name}: {questions}{split['rows']:,} rows, {split['tokens']:,} tokens{words}")
        for column, lengths in split["lengths"].items():
            say(
                f"  {column} a row: mean {lengths['mean']:.1f}, min {lengths['min']}, "
                f"median {lengths['median']:g}, max {lengths['max']}"
            )
        if "distinct_ids" in split:
            say(
                f"  {split['distinct_ids']:,} distinct ids, {split['unknown_share']:.3%} unknown; "
                f"unigram entropy {split['unigram_entropy']:.4f} nats "
                f"(perplexity {split['unigram_perplexity']:,.1f})"
            )
        if "cross_entropy_under_train" in split:
            value = split["cross_entropy_under_train"]
            say(f"  cross-entropy under the training unigrams {value:.4f} nats")
        if "labels" in split:
            shown = [f"{label} {_short(count)}" for label, count in split["labels"].items()]
            say(f"  labels: {', '.join(shown)}")


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def verify(path: Path) -> None:
    """Check every block of every file and print what was found.

    Raises BadInput if there is no store, Failure naming file and block where it is damaged.
    """
    if not (path / "store.json").is_file():
        raise BadInput(f"{path} is not a store (no store.json)")
    try:
        store = open_store(path)
        store.tokenizer()
    except BadInput as error:
        raise Failure(str(error)) from None
    sizes = {
        name: file["bytes"]
        for split in store.meta["splits"].values()
        for name, file in split["files"].items()
    }
    wrong: dict[str, list[int]] = {name: [] for name in sizes}
    with Progress("verifying", sum(sizes.values()), "B") as shown:
        for name, block, good in store.verify():
            shown.advance(min(CHECKED, sizes[name] - block * CHECKED))
            if not good:
                wrong[name].append(block)
    for name, blocks in wrong.items():
        say(f"{name}: {'damaged' if blocks else 'ok'}")
    bad = [
        f"{path / name} block {block} (of {CHECKED} bytes)"
        for name, blocks in wrong.items()
        for block in blocks
    ]
    if bad:
        raise Failure(f"damaged: {', '.join(bad)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `stats`."""
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")
    add_json(parser)
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="Also draw how often the ids "
        "occur by rank, how long the rows are, and how many rows each class has, if there are "
        "classes; .png, .pdf or .svg (default: no figure).",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print, and perhaps write and draw, a store's description."""
    check_file(arguments.json)
    check_file(arguments.figure)
    if arguments.figure is not None:
        stats_figure.check(arguments.figure)
    store = open_store(arguments.store)
    surveys = survey(store)
    found = describe(store, surveys)
    show(found)
    if arguments.json is not None:
        write_json(arguments.json, found)
    if arguments.figure is not None:
        stats_figure.draw(
            arguments.figure,
            found,
            {name: split.counts for name, split in surveys.items()},
            {name: split.together for name, split in surveys.items()},
        )


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")


def run_verify(arguments: argparse.Namespace) -> None:
    """Verify a store."""
    verify(arguments.store)
