"""`stats` describes a store: lengths, ids, entropies, labels. `verify` checks its files."""

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
from xformer.data.files import BLOCK as CHECKSUM_BLOCK
from xformer.data.files import write_json
from xformer.data.joined import open_stores
from xformer.data.outputs import check_writable
from xformer.data.store import IGNORED, TEXTS, Ragged, Store, no_store

from . import stats_figure
from .arguments import add_json

BLOCK = 2**22  # values read at once


def id_counts(
    store: Store, split: str, advance: Callable[[int], None] = lambda tokens: None
) -> np.ndarray:
    """How often each id occurs in all texts of a split, int64 (vocab_size,).

    `advance` is called with the number of tokens of each block read. Raises BadInput if an id is
    outside the vocabulary.
    """
    counts = np.zeros(store.vocab_size, np.int64)
    for column in text_columns(store, split).values():
        for block in _blocks(column.values):
            if len(block) and block.max() >= store.vocab_size:
                raise BadInput(
                    f"{store.path} is damaged: it contains an id outside its vocabulary of "
                    f"{store.vocab_size}; make it again"
                )
            counts += np.bincount(block, minlength=store.vocab_size)
            advance(len(block))
    return counts


def text_columns(store: Store, split: str) -> dict[str, Ragged]:
    """The columns that hold ids. Other ragged columns hold something else, such as characters."""
    columns = store.split(split).columns
    return {name: columns[name] for name in TEXTS if name in columns}


def row_lengths(columns: Sequence[Ragged]) -> Counter[int]:
    """How many rows have each number of tokens. The tokens of all columns are added."""
    rows: Counter[int] = Counter()
    for start in range(0, len(columns[0]), BLOCK):
        lengths = sum(np.diff(column.offsets[start : start + BLOCK + 1]) for column in columns)
        values, counts = np.unique(lengths, return_counts=True)
        rows.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return rows


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), BLOCK):
        yield values[start : start + BLOCK]


def entropy(counts: np.ndarray) -> float:
    """The entropy of the ids' relative frequencies, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def cross_entropy(counts: np.ndarray, model: np.ndarray) -> float:
    """The cross-entropy in nats of ids with these counts under the frequencies `model`.

    One is added to every count of `model`. The result is the loss of a model that knows the
    frequencies and ignores the context.
    """
    log_shares = np.log((model + 1) / (model.sum() + len(model)))
    return float(-(counts * log_shares).sum() / counts.sum())


def _summary(lengths: Counter[int]) -> dict[str, float]:
    values = np.array(sorted(lengths))
    counts = np.array([lengths[value] for value in values])
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
        if store.kind == "choice":  # each row of a question has the same label
            labels, values = [f"ending {i}" for i in range(store.choices)], values[:: store.choices]
        names = ["(not in training)", "(none)", *labels]  # stored as -2, -1, 0, ...
        counts = np.zeros(len(names), np.int64)
        for block in _blocks(values):
            if len(block) and (block.min() < IGNORED or block.max() >= len(labels)):
                raise BadInput(
                    f"{store.path} is damaged: it contains a label that is not one of its "
                    f"{len(labels)} classes; make it again"
                )
            counts += np.bincount(block[block != IGNORED] + 2, minlength=len(names))
        by_name = dict(zip(names, counts.tolist(), strict=True))
        others = {name: by_name[name] for name in ("(none)", "(not in training)") if by_name[name]}
        return {name: by_name[name] for name in labels} | others
    if store.kind == "span":  # the first and the last token, -1 if there is no answer
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
    summary: dict[str, Any] = {"(none)": len(values) - number} if number < len(values) else {}
    if number:
        mean = total / number
        squares = sum(
            np.nansum(np.square(block - mean, dtype=np.float64)) for block in _blocks(values)
        )
        summary |= {"mean": float(mean), "std": float(np.sqrt(squares / number))}
        summary |= {"min": float(least), "max": float(most)}
    return summary


@dataclass(frozen=True)
class SplitSurvey:
    """The result of reading a split once.

    `counts` is the number of times each id occurs. For each column of texts, `lengths` says how
    many rows have each number of tokens; `together` says it for the tokens of all columns. `labels`
    counts labels.
    """

    rows: int
    counts: np.ndarray
    lengths: dict[str, Counter[int]]
    together: Counter[int]
    labels: dict[str, Any] | None


def survey(store: Store) -> dict[str, SplitSurvey]:
    """Read every split once, in blocks, so memory does not grow with the store."""
    columns = {name: text_columns(store, name) for name in store.splits}
    total = sum(len(column.values) for split in columns.values() for column in split.values())
    surveys = {}
    with Progress("counting", total, "tokens") as bar:
        for name in store.splits:
            split = store.split(name)
            lengths = {column: row_lengths([values]) for column, values in columns[name].items()}
            together = row_lengths(list(columns[name].values()))
            tags = split.columns.get("labels")  # one label for each word
            label = split.columns.get("label") if tags is None else tags.values
            labels = None if label is None else _labels(store, label)
            counts = id_counts(store, name, bar.advance)
            surveys[name] = SplitSurvey(split.rows, counts, lengths, together, labels)
    return surveys


def describe_store(store: Store, surveys: dict[str, SplitSurvey] | None = None) -> dict[str, Any]:
    """Rows, tokens, lengths, ids, entropies in nats and labels of every split, ready for JSON."""
    surveys = surveys or survey(store)
    tokenizer = store.tokenizer()
    predicted = np.ones(store.vocab_size, bool)  # masked language modelling never predicts others
    predicted[tokenizer.all_special] = False
    train = surveys["train"].counts * predicted if "train" in surveys else None
    unknown = tokenizer.special["unk"]
    splits: dict[str, Any] = {}
    for name, split in surveys.items():
        counts, tokens = split.counts, int(split.counts.sum())
        entry: dict[str, Any] = {"rows": split.rows, "tokens": tokens}
        if store.kind == "choice":
            entry["questions"] = split.rows // store.choices
        if (words := store.split(name).words) is not None:
            entry["words"] = words
        entry["lengths"] = {column: _summary(rows) for column, rows in split.lengths.items()}
        if tokens:
            entry["distinct_ids"] = int(np.count_nonzero(counts))
            entry["unknown_share"] = float(counts[unknown] / tokens)
        if (ordinary := counts * predicted).any():
            entry["unigram_entropy"] = entropy(ordinary)
            entry["unigram_perplexity"] = float(np.exp(entry["unigram_entropy"]))
            if train is not None:
                entry["cross_entropy_under_train"] = cross_entropy(ordinary, train)
        if split.labels is not None:
            entry["labels"] = split.labels
        splits[name] = entry
    return {
        "store": store.path.resolve().name,
        "kind": store.kind,
        **({"choices": store.choices} if store.kind == "choice" else {}),
        "metric": store.metric,
        "vocab_size": store.vocab_size,
        "splits": splits,
    }


def say_description(about: dict[str, Any]) -> None:
    """Print the result of `describe_store`, with a block of lines for each split."""
    metric = f", metric {about['metric']}" if about["metric"] else ""
    kind = f"{about['kind']} of {about['choices']}" if "choices" in about else about["kind"]
    say(f"{about['store']}: {kind}{metric}, vocabulary {about['vocab_size']:,}")
    for name, split in about["splits"].items():
        words = f", {split['words']:,} words" if "words" in split else ""
        questions = f"{split['questions']:,} questions, " if "questions" in split else ""
        say(f"{name}: {questions}{split['rows']:,} rows, {split['tokens']:,} tokens{words}")
        for column, lengths in split["lengths"].items():
            say(
                f"  {column} per row: mean {lengths['mean']:.1f}, min {lengths['min']}, "
                f"median {lengths['median']:g}, max {lengths['max']}"
            )
        if "distinct_ids" in split:
            line = f"{split['distinct_ids']:,} distinct ids, {split['unknown_share']:.3%} unknown"
            if "unigram_entropy" in split:
                line += f"; unigram entropy {abs(split['unigram_entropy']):.4f} nats"
                line += f" (perplexity {split['unigram_perplexity']:,.1f})"
            say(f"  {line}")
        if "cross_entropy_under_train" in split:
            value = split["cross_entropy_under_train"]
            say(f"  cross-entropy under the training unigrams {value:.4f} nats")
        if "labels" in split:
            shown, most = split["labels"], stats_figure.CLASSES
            if rest := max(len(shown) - most, 0):
                shown = dict(Counter(shown).most_common(most))
            labels = [f"{label} {_short(count)}" for label, count in shown.items()]
            labels += [f"and {rest:,} rarer ones"] if rest else []
            say(f"  labels: {', '.join(labels)}")


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def verify_store(path: Path) -> None:
    """Check every block of every file of a store, and print the result for each file.

    Raises BadInput if there is no store. Raises Failure naming the damaged files and blocks, or if
    the store is replaced meanwhile.
    """
    if not (path / "store.json").is_file():
        raise no_store(path)
    try:
        store = open_stores(path)
        store.tokenizer()
    except BadInput as error:
        raise Failure(str(error)) from None
    sizes = {
        part.path / name: file["bytes"]
        for part in store.parts
        for split in part.meta["splits"].values()
        for name, file in split["files"].items()
    }
    wrong: dict[Path, list[int]] = {file: [] for file in sizes}
    left = sum(-(-size // CHECKSUM_BLOCK) for size in sizes.values())
    with Progress("verifying", sum(sizes.values()), "B") as bar:
        for part in store.parts:
            for name, block, good in part.verify():
                file, left = part.path / name, left - 1
                bar.advance(min(CHECKSUM_BLOCK, sizes[file] - block * CHECKSUM_BLOCK))
                if not good:
                    wrong[file].append(block)
    if left:
        raise Failure(f"{path} was replaced while it was checked; run again")
    for file, blocks in wrong.items():
        shown = file.relative_to(path) if file.is_relative_to(path) else file
        say(f"{shown}: {'damaged' if blocks else 'ok'}")
    bad = [
        f"{file} block {block} (of {CHECKSUM_BLOCK} bytes)"
        for file, blocks in wrong.items()
        for block in blocks
    ]
    if bad:
        raise Failure(f"damaged: {', '.join(bad)}; make the store again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stats`."""
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")
    add_json(parser)
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="Also draw the frequencies of the ids by rank, the lengths of the rows and, if there "
        "are classes, the number of rows of each class. FILE must end in .png, .pdf or .svg "
        "(default: no figure).",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print a store's description, write it with --json, and draw it with --figure."""
    for path in filter(None, (arguments.json, arguments.figure)):
        check_writable(path)
    if arguments.figure is not None:
        stats_figure.check_figure(arguments.figure)
    store = open_stores(arguments.store)
    surveys = survey(store)
    about = describe_store(store, surveys)
    say_description(about)
    if arguments.json is not None:
        write_json(arguments.json, about)
    if arguments.figure is not None:
        stats_figure.draw_store(
            arguments.figure,
            about,
            {name: split.counts for name, split in surveys.items()},
            {name: split.together for name, split in surveys.items()},
        )


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `verify`."""
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")


def run_verify(arguments: argparse.Namespace) -> None:
    """Verify a store."""
    verify_store(arguments.store)
