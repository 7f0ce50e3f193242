"""Labelled examples -> a store with a `label` column: what every task's reader returns, the checks
and the splitting they share, and the table of task names.

To add a task: write a module with `add_arguments(parser)` and `read(arguments) -> Task`, and name
it in `preprocess/cli.py`'s table.
"""

from __future__ import annotations

import argparse
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from preprocess.arguments import add_output, check_output, number, origin, summarise
from preprocess.binarize import BATCH, sources
from preprocess.progress import progress
from preprocess.words import Encoder
from xformer.data import tokenizers
from xformer.data.errors import BadInput
from xformer.data.store import SplitWriter, create_store
from xformer.data.tokenizers import Tokenizer

CLASS_METRICS = ("accuracy", "f1", "mcc")
SCORE_METRICS = ("spearman", "pearson")
SHARES = {"test": 0.05, "valid": 0.05}  # of a source without splits; the rest is `train`
MAX_CLASSES = 1000


class Row(NamedTuple):
    """One example: one text or two, the label as it is written (None: there is none)."""

    split: str  # "" where the source has no splits
    texts: tuple[str, ...]
    label: str | None
    file: Path
    line: int


@dataclass(frozen=True)
class Task:
    """What a reader makes of its arguments.

    `rows` reads everything anew each time it is called. `labels` fixes the classes and their order
    (None: the sorted names found). `columns` says which column of the raw file is which, for
    programs that read such files later. `tokenizer` is used where the user gives none.
    """

    rows: Callable[[], Iterator[Row]]
    files: list[Path]
    kind: str  # "class" or "score"
    metric: str
    columns: dict[str, Any]
    labels: list[str] | None = None
    tokenizer: Tokenizer | None = None
    pairs: bool = False


@dataclass
class Survey:
    """What one pass over the rows finds: counts, the labels' first places, each text's key."""

    rows: dict[str, int] = field(default_factory=dict)
    first: dict[str, dict[str, str]] = field(default_factory=dict)  # split -> label -> file:line
    keys: array[int] = field(default_factory=lambda: array("Q"))


def check_metric(kind: str, metric: str | None) -> str:
    """The metric to report, by default accuracy or spearman. Raises BadInput on a wrong one."""
    allowed = CLASS_METRICS if kind == "class" else SCORE_METRICS
    if metric is None:
        return allowed[0]
    if metric not in allowed:
        raise BadInput(f"--metric {metric} does not fit --kind {kind}: {', '.join(allowed)} do")
    return metric


def write_task(
    task: Task,
    output: Path,
    tokenizer: Tokenizer,
    seed: int,
    origin: dict[str, Any],
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Check every row, then encode and write them all. Returns rows and tokens of every split.

    A source without splits is divided 90/5/5 by `seed`; equal texts stay together. The label
    column is int64 (a class id, -1 where a test row has none) or float32 (NaN where none).
    Raises BadInput naming file and line of a label or score that cannot be.
    """
    survey = _survey(task, seed)
    drawn = _draw_splits(task, survey) if "" in survey.rows else None
    if drawn is not None:
        origin = {**origin, "seed": seed}
        survey = _survey(task, seed, drawn)
    labels = _class_names(task, survey, drawn is not None) if task.kind == "class" else []
    names: list[str] = [name for name in ("train", "valid", "test") if name in survey.rows]
    texts = ["tokens", "tokens_b"] if task.pairs else ["tokens"]
    columns = {**dict.fromkeys(texts, ""), "label": _dtype(task.kind)}
    with create_store(output, tokenizer, columns, texts, overwrite) as store:
        with ExitStack() as stack:
            splits = {name: stack.enter_context(store.split(name)) for name in names}
            encoder = Encoder(tokenizer)
            with progress("encoding", sum(survey.rows.values()), "rows") as shown:
                for batch in _batches(_rows(task, drawn)):
                    _append(splits, batch, encoder, labels)
                    shown.add(len(batch))
        origin = {**origin, "sources": sources(task.files), "columns": task.columns}
        # splits close in reverse; the store lists them in their usual order
        store.splits = {name: store.splits[name] for name in names}
        store.finish(task.kind, labels, task.metric, origin)
        return store.splits


def _dtype(kind: str) -> str:
    return "int64" if kind == "class" else "float32"


def _rows(task: Task, drawn: Sequence[str] | None) -> Iterator[Row]:
    if drawn is None:
        return task.rows()
    return (row._replace(split=split) for row, split in zip(task.rows(), drawn, strict=True))


def _survey(task: Task, seed: int, drawn: Sequence[str] | None = None) -> Survey:
    survey = Survey()
    salt = seed.to_bytes(8, "little", signed=True)
    for row in _rows(task, drawn):
        survey.rows[row.split] = survey.rows.get(row.split, 0) + 1
        if row.label is None and row.split in ("train", "valid", ""):
            raise BadInput(f"{row.file}:{row.line}: the label is empty")
        if task.kind == "score" and row.label is not None:
            _number(row)
        elif row.label is not None:
            first = survey.first.setdefault(row.split, {})
            if row.label not in first:
                first[row.label] = f"{row.file}:{row.line}"
                if len(first) > MAX_CLASSES:
                    raise BadInput(
                        f"{row.file}: the label column holds more than {MAX_CLASSES} classes; "
                        "are these numbers (--kind score)?"
                    )
        if not row.split:
            text = "\0".join(text.strip() for text in row.texts).encode()
            key = blake2b(text, digest_size=8, salt=salt).digest()
            survey.keys.append(int.from_bytes(key, "little"))
    if not survey.rows:
        raise BadInput(f"{task.files[0]} holds no example")
    return survey


def _number(row: Row) -> float:
    try:
        value = float(row.label or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{row.file}:{row.line}: the score {row.label!r} is not a number")
    return value


def _draw_splits(task: Task, survey: Survey) -> list[str]:
    """The split of every row. Equal texts have one key, and a key lies in one split.

    The keys are hashes of (seed, text), so their sorted order is the seed's own permutation.
    """
    keys, group, sizes = np.unique(survey.keys, return_inverse=True, return_counts=True)
    start = (np.cumsum(sizes) - sizes) / len(group)  # where a group begins, as a share of all
    bounds = np.cumsum(list(SHARES.values()))
    names = [*SHARES, "train"]
    of_key = np.searchsorted(bounds, start, side="right")
    if len(set(of_key)) < len(names):
        raise BadInput(
            f"{task.files[0]} holds {len(keys)} different examples, too few to be split 90/5/5; "
            "give a directory with train, valid and test files"
        )
    return [names[i] for i in of_key[group]]


def _class_names(task: Task, survey: Survey, drawn: bool) -> list[str]:
    labels = task.labels or sorted(survey.first.get("train", {}))
    for split, first in survey.first.items():
        for label in sorted(set(first) - set(labels)):
            if task.labels:
                raise BadInput(f"{first[label]}: label {label!r} is not among --labels")
            hint = "; another --seed may draw it there" if drawn else ""
            raise BadInput(f"{first[label]}: label {label!r} is in {split} and not in train{hint}")
    if len(labels) < 2:
        raise BadInput(f"{task.files[0]}: there is one class only, {', '.join(labels)}")
    return labels


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in batches of about BATCH characters."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(map(len, row.texts)) + 64
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(
    splits: dict[str, SplitWriter], batch: list[Row], encoder: Encoder, labels: list[str]
) -> None:
    class_ids = {label: i for i, label in enumerate(labels)}
    for name, split in splits.items():
        rows = [row for row in batch if row.split == name]
        if rows:
            for i, column in enumerate(split.offsets):
                split.append_ragged(column, *encoder.encode([row.texts[i] for row in rows]))
            split.append("label", np.array([_label(row, class_ids) for row in rows]))


def _label(row: Row, class_ids: dict[str, int]) -> float:
    if class_ids:
        return -1 if row.label is None else class_ids[row.label]
    return math.nan if row.label is None else _number(row)


def find_splits(directory: Path, endings: Sequence[str]) -> dict[str, Path]:
    """split -> file for a directory with train, valid (or dev) and test files of one ending.

    Raises BadInput if there is no training file, or files of several endings.
    """
    stems = {"train": "train", "valid": "valid", "dev": "valid", "validation": "valid"}
    stems["test"] = "test"
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        split = stems.get(path.stem)
        if split is None or path.suffix not in endings or not path.is_file():
            continue
        if split in found:
            raise BadInput(
                f"{directory} holds both {found[split].name} and {path.name}: which is {split}?"
            )
        found[split] = path
    if "train" not in found:
        raise BadInput(f"{directory} holds no training file (train{', train'.join(endings)})")
    if len({path.suffix for path in found.values()}) > 1:
        names = ", ".join(path.name for path in found.values())
        raise BadInput(f"{directory} holds files of several endings: {names}")
    return {name: found[name] for name in ("train", "valid", "test") if name in found}


def input_files(source: Path, endings: Sequence[str]) -> dict[str, Path]:
    """split -> file; a single file has the split "". Raises BadInput, also for empty files."""
    files = find_splits(source, endings) if source.is_dir() else {"": source}
    for path in files.values():
        if not path.is_file():
            raise BadInput(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise BadInput(f"{path} is empty")
    return files


def add_arguments(parser: argparse.ArgumentParser, add_own: Callable[..., None]) -> None:
    """The options of every task, with `add_own` for those of its own."""
    add = parser.add_argument
    add("--input", type=Path, required=True, metavar="FILE|DIR",
        help="The raw file, or a directory that holds the train, valid (or dev) and test "
        "files. A single file is split 90/5/5.")  # fmt: skip
    add("--tokenizer", type=Path, metavar="TOK", help="The directory of a tokenizer, a store or a "
        "checkpoint (default: the alphabet of the task, if it has one).")  # fmt: skip
    add("--seed", type=number(0), default=0, metavar="N",
        help="Draws the splits of a single file (default: %(default)s).")  # fmt: skip
    add_own(parser)
    add_output(parser, "STORE")


def run(read: Callable[[argparse.Namespace], Task], arguments: argparse.Namespace) -> None:
    """Encode a labelled task into a store."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    if not arguments.input.exists():
        raise BadInput(f"{arguments.input} does not exist")
    task = read(arguments)
    tokenizer = tokenizers.load(arguments.tokenizer) if arguments.tokenizer else task.tokenizer
    if tokenizer is None:
        raise BadInput("--tokenizer is required for this task: it has no alphabet of its own")
    started = time.monotonic()
    written = write_task(
        task, arguments.output, tokenizer, arguments.seed, origin(), arguments.overwrite
    )
    size = sum(path.stat().st_size for path in task.files)
    summarise(arguments.output, written, started, size)
