"""What is in a store: lengths, ids, entropies, labels; and whether its files are undamaged."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.arguments import add_json, check_json
from xformer.data.errors import BadInput, Failure
from xformer.data.files import BLOCK as CHECKED
from xformer.data.files import write_json
from xformer.data.store import Ragged, Store, open_store

BLOCK = 2**22  # values read at once


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), BLOCK):
        yield values[start : start + BLOCK]


def id_counts(store: Store, split: str) -> np.ndarray:
    """How often every id occurs in a split, int64 (vocab_size,), over all its texts."""
    counts = np.zeros(store.vocab_size, np.int64)
    for column in store.split(split).columns.values():
        if isinstance(column, Ragged):
            for block in _blocks(column.values):
                counts += np.bincount(block, minlength=store.vocab_size)
    return counts


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


def _lengths(column: Ragged) -> dict[str, float]:
    found: Counter[int] = Counter()
    for start in range(0, len(column), BLOCK):
        lengths = np.diff(column.offsets[start : start + BLOCK + 1])
        values, counts = np.unique(lengths, return_counts=True)
        found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    values = np.array(sorted(found))
    ends = np.cumsum([found[value] for value in values])
    rows = int(ends[-1])
    middle = [values[np.searchsorted(ends, place, side="right")]
              for place in ((rows - 1) // 2, rows // 2)]  # fmt: skip
    return {
        "mean": len(column.values) / rows,
        "min": int(values[0]),
        "median": float(np.mean(middle)),
        "max": int(values[-1]),
    }


def _labels(store: Store, values: np.ndarray) -> dict[str, Any]:
    if store.kind == "class":
        counts = np.bincount(np.asarray(values) + 1, minlength=len(store.labels) + 1).tolist()
        named = dict(zip(store.labels, counts[1:], strict=True))
        return named | ({"(none)": counts[0]} if counts[0] else {})
    scores = np.asarray(values)[~np.isnan(values)]
    found: dict[str, Any] = (
        {"(none)": len(values) - len(scores)} if len(scores) < len(values) else {}
    )
    if len(scores):
        found |= {"mean": float(scores.mean()), "std": float(scores.std())}
        found |= {"min": float(scores.min()), "max": float(scores.max())}
    return found


def describe(store: Store) -> dict[str, Any]:
    """Rows, tokens, lengths, ids, entropies and labels of every split, read in blocks."""
    train = id_counts(store, "train") if "train" in store.splits else None
    unknown = store.tokenizer().special["unk"]
    splits: dict[str, Any] = {}
    for name in store.splits:
        split = store.split(name)
        counts = id_counts(store, name)
        found: dict[str, Any] = {"rows": split.rows, "tokens": split.tokens}
        texts = {c: v for c, v in split.columns.items() if isinstance(v, Ragged)}
        found["lengths"] = {column: _lengths(values) for column, values in texts.items()}
        if split.tokens:
            found["distinct_ids"] = int(np.count_nonzero(counts))
            found["unknown_share"] = float(counts[unknown] / counts.sum())
            found["unigram_entropy"] = entropy(counts)
            found["unigram_perplexity"] = float(np.exp(found["unigram_entropy"]))
            if train is not None:
                found["cross_entropy_under_train"] = cross_entropy(counts, train)
        if "label" in split.columns:
            found["labels"] = _labels(store, split.columns["label"])
        splits[name] = found
    return {
        "store": store.path.name,
        "kind": store.kind,
        "metric": store.metric,
        "vocab_size": store.vocab_size,
        "splits": splits,
    }


def show(found: dict[str, Any]) -> None:
    """Print a description, a block of lines a split."""
    metric = f", metric {found['metric']}" if found["metric"] else ""
    print(f"{found['store']}: {found['kind']}{metric}, vocabulary {found['vocab_size']:,}")
    for name, split in found["splits"].items():
        print(f"{name}: {split['rows']:,} rows, {split['tokens']:,} tokens")
        for column, lengths in split["lengths"].items():
            print(
                f"  {column} a row: mean {lengths['mean']:.1f}, min {lengths['min']}, "
                f"median {lengths['median']:g}, max {lengths['max']}"
            )
        if "distinct_ids" in split:
            print(
                f"  {split['distinct_ids']:,} distinct ids, {split['unknown_share']:.3%} unknown; "
                f"unigram entropy {split['unigram_entropy']:.4f} nats "
                f"(perplexity {split['unigram_perplexity']:,.1f})"
            )
        if "cross_entropy_under_train" in split:
            value = split["cross_entropy_under_train"]
            print(f"  cross-entropy under the training unigrams {value:.4f} nats")
        if "labels" in split:
            shown = [f"{label} {_short(count)}" for label, count in split["labels"].items()]
            print(f"  labels: {', '.join(shown)}")


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
    bad: list[str] = []
    for name, blocks in groupby(store.verify(), key=itemgetter(0)):
        wrong = [block for _, block, good in blocks if not good]
        print(f"{name}: {'damaged' if wrong else 'ok'}", flush=True)
        bad += [f"{path / name} block {block} (of {CHECKED} bytes)" for block in wrong]
    if bad:
        raise Failure(f"damaged: {', '.join(bad)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `stats`."""
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print, and perhaps write, a store's description."""
    check_json(arguments.json)
    found = describe(open_store(arguments.store))
    show(found)
    if arguments.json is not None:
        write_json(arguments.json, found)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")


def run_verify(arguments: argparse.Namespace) -> None:
    """Verify a store."""
    verify(arguments.store)
