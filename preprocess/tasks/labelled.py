"""Labelled examples -> a store for fine-tuning.

The reader of each data set returns a `TaskSource`. This module holds what all tasks share: it
checks the rows, draws the splits and writes the store, with a column `label` (one per row) or
`labels` (one per token).

To add a task, write a module with `add_arguments(parser)` and `read(arguments) -> TaskSource`, and
add it to the table `TASK_READERS` in `preprocess/cli.py`.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.data import tokenizers
from xformer.data.arguments import whole_number
from xformer.data.display import Progress, many, say
from xformer.data.errors import BadInput
from xformer.data.outputs import check_directory
from xformer.data.spelled import Spelled
from xformer.data.store import IGNORED, NO_LABEL, ORDER, UNLABELLED, UNSEEN, marks_entities
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, command_origin, say_written
from ..bad import BadRows
from ..binarize import BATCH, check_exists, sources
from ..words import CachedEncoder
from .first_tokens import encode_words

CLASS_METRICS = ("accuracy", "f1", "mcc")
SCORE_METRICS = ("spearman", "pearson")
TAG_METRICS = ("accuracy", "f1", "entity_f1")
# The shares of the rows if the source has no splits; the rest is train.
SHARES = {"test": 0.05, "valid": 0.05}
# The share if the source marks only its test rows. Min et al. 2019 divide DeepLoc in this way.
VALID_SHARE = 0.1
SHARED = 0.1  # a share of rows that share a text with train, above which it is told
MAX_CLASSES = 20_000
MANY_CLASSES = 50  # so many labels should occur more than once
# what programs write for a missing value; of two classes, - and -1 are likely to be the other one
MISSING = ("na", "nan", "n/a", "<na>", "null", "-", "?", "-1", "-1.0")
LARGEST_SCORE = float(np.finfo(np.float32).max)
LONGEST_TEXT = 2**24  # characters in one row, which is held in memory as a whole

Counts = dict[str, dict[str, int]]  # split -> a name -> how many rows


class Row(NamedTuple):
    """One example, as the raw file writes it.

    `texts` holds one text or two. In a choice task it holds a context and all its endings, and the
    label is the number of the right ending, counted from 0. In a tagging task the label holds the
    labels of all words, separated by spaces.
    """

    split: str  # "" if the source does not say; the split is then drawn
    texts: tuple[str, ...]
    label: str | None  # None: the row has no label
    file: Path
    line: int
    id: str | None = None  # the source's own name for the row
    group: str | None = None  # rows of one group, such as segments of a piece, are scored together
    key: str | None = None  # rows with the same key are drawn into the same split (None: the texts)


@dataclass(frozen=True)
class TaskSource:
    """A data set as its reader describes it: where the rows are and what the labels mean."""

    rows: Callable[[], Iterator[Row]]  # each call reads the files again
    files: list[Path]
    kind: str  # "class", "score", "tag" or "choice"
    metric: str | None  # None (tagging only): chosen by the names of the classes
    columns: dict[str, Any]  # which column of the raw file is which, for `evaluate.py input=`
    bad: BadRows
    splits: Sequence[tuple[str, Path]] = ()  # splits that must hold a row, with one file of each
    left_out: BadRows = field(default_factory=lambda: BadRows(skip=True))  # not part of the task
    labels: list[str] | None = None  # classes in order (None: those in training, sorted by name)
    tokenizer: Tokenizer | None = None  # used if the user gives none
    pairs: bool = False  # whether a row has two texts
    group: str = ""  # the column of --group, whose rows with equal values stay in one split
    split_columns: set[str] = field(default_factory=set)  # the columns that named splits so far

    @property
    def place(self) -> str:
        """Its files, for a message: "a.tsv" or "a.tsv and 7 other files"."""
        more = len(self.files) - 1
        return f"{self.files[0]} and {many(more, 'other file')}" if more else str(self.files[0])

    @property
    def noun(self) -> str:
        """What has a label, in the plural."""
        return "words" if self.kind == "tag" else "rows"

    @property
    def has_classes(self) -> bool:
        """Whether labels are the names of classes."""
        return self.kind in ("class", "tag")


@dataclass
class RowSurvey:
    """The result of one pass over the rows. It takes 8 bytes of memory per row, 8 more if splits of
    a task with classes are drawn, 16 more if those of pairs are, and 8 more with --group. `_rows`
    takes more if rows have ids: a hash of each, in a set.
    """

    rows: dict[str, int] = field(default_factory=dict)  # split -> how many
    labels: dict[str, Counter[str]] = field(default_factory=dict)  # split -> class -> how many
    classes: set[str] = field(default_factory=set)
    with_labels: set[str] = field(default_factory=set)  # the splits in which a row has a label
    keys: dict[str, array[int]] = field(default_factory=dict)  # split -> hash of each row's key
    texts: dict[str, array[int]] = field(default_factory=dict)  # ... of its texts, with --group
    parts: dict[str, array[int]] = field(default_factory=dict)  # ... of each text of drawn pairs
    to_draw: array[int] = field(default_factory=lambda: array("L"))  # classes of rows without split
    ids: bool = False  # whether rows have ids
    groups: bool = False  # whether rows have groups
    choices: int = 1  # endings of a question
    empty: int = 0  # rows without any text
    first_empty: str = ""  # file and line of the first of them


def add_labels(parser: argparse.ArgumentParser) -> None:
    """Add --labels."""
    parser.add_argument(
        "--labels",
        metavar="A,B,C",
        help='The classes in the order of their ids; "X, Y" is a name with a comma (default: those '
        "of the training file, sorted by name).",
    )


def given_labels(names: str | None) -> list[str] | None:
    """The classes of --labels. Raises BadInput if a name is empty or repeated."""
    if not names:
        return None
    if len(names.splitlines()) > 1:
        raise BadInput("--labels: give all names in one line")
    labels = [name.strip() for name in next(csv.reader([names], skipinitialspace=True))]
    if len(set(labels)) != len(labels):
        raise BadInput(f"--labels {names}: give each class once")
    if "" in labels:
        raise BadInput(f"--labels {names}: a name is empty; leave out the extra comma")
    return labels


def check_metric(kind: str, metric: str | None) -> str:
    """The metric to report, by default accuracy or spearman.

    Raises BadInput if `metric` does not fit the kind of task.
    """
    allowed = {"class": CLASS_METRICS, "score": SCORE_METRICS}[kind]
    if metric is None:
        return allowed[0]
    if metric not in allowed:
        raise BadInput(
            f"--metric {metric} does not fit --kind {kind}; choose one of {', '.join(allowed)}"
        )
    return metric


def write_task(
    task: TaskSource,
    output: Path,
    tokenizer: Tokenizer,
    seed: int,
    origin: dict[str, Any],
    overwrite: bool = False,
    stratify: bool = False,
) -> dict[str, dict[str, Any]]:
    """Check every row, then encode and write them all. Returns rows and tokens of every split.

    Splits that the source names are kept; texts that are in two of them are counted in the origin
    and on standard error. A source without splits is divided 90/5/5 by `seed`, and one that marks
    only its test rows 90/10. With `stratify` each class is divided in the same way. Rows with equal
    keys, and without keys those with equal texts, stay in one split.

    The label column is int64 for classes: UNLABELLED if a row has no label, UNSEEN if no row of
    training has its class. It is float32 for scores, NaN if a row has none. The labels of a tagging
    task are int16, one per token, IGNORED if no word begins there.

    Raises BadInput naming file and line of a row that cannot be used, unless bad rows are skipped.
    """
    survey = _survey(task, seed)
    _refuse_labels_of_rows(task, survey)
    if stratify and (task.kind != "class" or "" not in survey.rows):
        why = "the task has no classes" if task.kind != "class" else "the source names its splits"
        raise BadInput(f"--stratify divides the rows of each class, but {why}; leave it out")
    if stratify and task.group:
        raise BadInput(
            "--stratify divides the rows of each class, but --group keeps rows together; leave one "
            "of them out"
        )
    drawn = _draw_splits(task, survey, stratify) if "" in survey.rows else None
    if drawn is not None:
        origin = {**origin, "seed": seed} | ({"stratified": True} if stratify else {})
        survey = _survey(task, seed, drawn)
    _say_splits(task, survey, seed if drawn is not None else None)
    if "train" not in survey.rows:
        raise BadInput(f"{task.place}: no row is for training")
    in_two_splits = _in_two_splits(survey.rows, survey.texts or survey.keys, "texts")
    groups_in_two = _in_two_splits(survey.rows, survey.keys, "groups") if task.group else {}
    if drawn is not None and not task.group:
        _say_shared(survey)
    labels = _class_names(task, survey) if task.has_classes else []
    unseen = _unseen(survey, labels, task.noun) if task.has_classes else {}
    if task.kind == "class" and not task.labels:
        _say_odd_classes(survey, labels)
    if task.has_classes and not task.labels:
        _say_look_alikes(survey, task.noun)
    _say_lacking(survey, labels, task.noun)
    _say_unlabelled(task, survey)
    say_empty(survey.empty, sum(survey.rows.values()), survey.first_empty)
    names: list[str] = [name for name in ORDER if name in survey.rows]
    columns, ragged = store_columns(task.kind, task.pairs, survey.ids, survey.groups)
    with create_store(output, tokenizer, columns, ragged, overwrite) as store:
        with ExitStack() as stack:
            splits = {name: stack.enter_context(store.split(name)) for name in names}
            rows, classes = _rows(task, drawn), labels
            if task.kind == "choice":
                rows, classes = each_ending(rows), ending_numbers(survey.choices)
            writer = RowWriter(splits, CachedEncoder(tokenizer), classes)
            total = sum(survey.rows.values()) * survey.choices
            with Progress("encoding", total, "rows") as progress:
                for batch in row_batches(rows):
                    writer.append(batch)
                    progress.advance(len(batch))
        origin = {**origin, **_task_origin(task, unseen, in_two_splits, groups_in_two)}
        say(*filter(None, [writer.spelled.note()]), error=True)
        # the stack closes the splits last to first; list them in their usual order
        store.splits = {name: store.splits[name] for name in names}
        metric = task.metric or ("entity_f1" if marks_entities(labels) else "accuracy")
        store.finish(task.kind, labels, metric, origin, survey.choices)
        return store.splits


def _task_origin(
    task: TaskSource, unseen: Counts, in_two_splits: Counts, groups_in_two: Counts
) -> dict[str, Any]:
    """What the store's origin records about the task: its files and columns, and anything
    unusual.
    """
    oddities = {
        "unseen": unseen,
        "left_out_rows": task.left_out.count,
        "in_two_splits": in_two_splits,
        "groups_in_two_splits": groups_in_two,
        "split_columns": sorted(task.split_columns),
    }
    record = {"sources": sources(task.files), "columns": task.columns, **task.bad.as_origin()}
    return record | {key: value for key, value in oddities.items() if value}


def store_columns(
    kind: str, pairs: bool, ids: bool, groups: bool, inputs: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The type of every column of a store of this kind, and the names of the ragged columns.

    The type "" stands for that of token ids. `pairs` says whether a row has two texts. `inputs` are
    columns for the texts themselves.
    """
    texts = ["tokens", "tokens_b"] if pairs else ["tokens"]
    label = {"score": {"label": "float32"}, "tag": {"labels": "int16"}}
    columns = {**dict.fromkeys(texts, ""), **label.get(kind, {"label": "int64"})}
    columns |= dict.fromkeys(inputs, "uint8")
    columns |= {"id": "uint8"} if ids else {}
    columns |= {"group": "int64"} if groups else {}
    return columns, [name for name in columns if name not in ("label", "group")]


def _rows(task: TaskSource, drawn: Sequence[str] | None) -> Iterator[Row]:
    """The rows that can be used, each with its split: its own, or the next one of `drawn`."""
    splits = iter(drawn) if drawn is not None else None
    ids: set[bytes] = set()  # hashes, which take less memory than names
    for row in task.rows():
        reason = _fault(task, row)
        if reason is None and row.id is not None:
            name = blake2b(f"{row.split}\0{row.id}".encode(), digest_size=16).digest()
            reason = f"an earlier row has the id {row.id!r} too" if name in ids else None
            ids.add(name)
        if reason is not None:
            task.bad(row.file, row.line, reason)
        else:
            yield row if splits is None or row.split else row._replace(split=next(splits))


def _fault(task: TaskSource, row: Row) -> str | None:
    """Why a row cannot be used; None if it can."""
    size = sum(map(len, row.texts))
    if size > LONGEST_TEXT:
        return f"the text has {size:,} characters; a row may hold at most {LONGEST_TEXT:,}"
    if row.label is None:
        may_lack = row.split.startswith("test") or (task.kind == "choice" and row.split == "valid")
        return None if may_lack else "the label is empty"
    if task.kind == "score":
        if abs(_number(row.label)) <= LARGEST_SCORE:  # false for NaN too
            return None
        if "," in row.label and not math.isnan(_number(row.label.replace(",", ".", 1))):
            line = f"the score {row.label!r} has a comma; write a decimal point"
            return f"{line}, and no separators of thousands"
        return f"the score {row.label!r} is not a number of at most 3.4e38"
    for label in _classes(task, row.label):
        if task.labels and label not in task.labels:
            return f"label {label!r} is not one of {', '.join(task.labels)}"
    return None


def _classes(task: TaskSource, label: str) -> list[str]:
    """The classes in a row's label: one, or one per labelled word."""
    if task.kind != "tag":
        return [label]
    return [name for name in label.split(" ") if name != NO_LABEL]


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan


def _survey(task: TaskSource, seed: int, drawn: Sequence[str] | None = None) -> RowSurvey:
    """Read and check all rows. Raises BadInput if no row can be used, or if a split is empty. Texts
    that differ only in whether an accent is a character of its own count as equal."""
    survey = RowSurvey()
    salt = seed.to_bytes(8, "little", signed=True)
    numbers: dict[str, int] = {}  # of the classes, in the order in which they appear
    apart: list[tuple[str, int, int]] = []  # keys that are not NFC: split, number, hash of the NFC

    def digest(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8, salt=salt).digest(), "little")

    def add(hashes: dict[str, array[int]], split: str, text: str) -> None:
        hashes.setdefault(split, array("Q")).append(digest(text))

    for row in _rows(task, drawn):
        if not row.split and task.kind == "class":
            survey.to_draw.append(numbers.setdefault(row.label or "", len(numbers)))
        survey.rows[row.split] = survey.rows.get(row.split, 0) + 1
        if row.label is not None:
            survey.with_labels.add(row.split)
        if task.kind != "score" and row.label is not None:
            classes = _classes(task, row.label)
            survey.labels.setdefault(row.split, Counter()).update(classes)
            survey.classes.update(classes)
            if len(survey.classes) > MAX_CLASSES:
                raise BadInput(
                    f"{row.file}: the label column holds more than {MAX_CLASSES} classes; "
                    "if these are numbers, give --kind score"
                )
        survey.ids |= row.id is not None
        survey.groups |= row.group is not None
        if task.kind == "choice":  # every question has equally many endings
            survey.choices = len(row.texts) - 1
        if not any(map(str.strip, row.texts)):
            survey.empty += 1
            survey.first_empty = survey.first_empty or f"{row.file}:{row.line}"
        text = "\0".join(text.strip() for text in row.texts)
        key = row.key or text
        add(survey.keys, row.split, key)
        if not unicodedata.is_normalized("NFC", key):
            number = len(survey.keys[row.split]) - 1
            apart.append((row.split, number, digest(unicodedata.normalize("NFC", key))))
        if task.group:
            add(survey.texts, row.split, text)
        elif drawn is not None and len(row.texts) > 1:  # pairs, and contexts of questions
            for part in row.texts[: 1 if task.kind == "choice" else 2]:
                add(survey.parts, row.split, part.strip())
    if apart:
        every = np.concatenate([np.asarray(keys) for keys in survey.keys.values()])
        twins = np.isin(np.array([composed for *_, composed in apart], np.uint64), every)
        for (split, number, composed), twin in zip(apart, twins, strict=True):
            if twin:  # a text without a twin keeps its hash, and so its split
                survey.keys[split][number] = composed
    for split, path in task.splits:
        if split and split not in survey.rows:
            raise BadInput(f"{path} holds no example, so the split {split} would be empty")
    if not survey.rows:
        raise BadInput(f"{task.place}: no example can be used")
    return survey


def _in_two_splits(rows: dict[str, int], hashes: dict[str, array[int]], what: str) -> Counts:
    """Count the texts or groups (`what`) that are in two splits, and print them on standard error.
    `rows` are the rows of each split, `hashes` those of their texts or groups.

    Returns split -> earlier split -> the number of the split's rows whose text or group is in the
    earlier one.
    """
    shared: Counts = {}
    names = [name for name in ORDER if name in hashes]
    for i, name in enumerate(names):
        keys = np.asarray(hashes[name])
        for earlier in names[:i]:
            if count := int(np.isin(keys, np.asarray(hashes[earlier])).sum()):
                shared.setdefault(name, {})[earlier] = count
    parts = [
        f"{count:,} of the {rows[name]:,} rows of {name} are in {earlier}"
        for name, counts in shared.items()
        for earlier, count in counts.items()
    ]
    if parts:
        say(f"note: the same {what} are in two splits: {'; '.join(parts)}", error=True)
    return shared


def _say_shared(survey: RowSurvey) -> None:
    """Warn if rows of drawn splits share one of their texts with train, such as the premise of
    several pairs. Equal rows are in one split."""
    in_train = survey.parts.pop("train", None)
    for split, hashes in survey.parts.items():
        rows = np.isin(np.asarray(hashes), np.asarray(in_train)).reshape(survey.rows[split], -1)
        if (count := int(rows.any(1).sum())) > SHARED * len(rows):
            which = f"{count:,} of the {len(rows):,} rows of {split} share a text with train"
            say(f"warning: {which}; --group COLUMN keeps equal texts in one split", error=True)


def _say_splits(task: TaskSource, survey: RowSurvey, seed: int | None) -> None:
    """Say which columns named the splits, or that they were drawn with a `seed`, and how many rows
    each split has."""

    def rows(names: Iterable[str]) -> str:
        return ", ".join(f"{name} {survey.rows[name]:,}" for name in names if name in survey.rows)

    if not task.split_columns:
        if seed is not None:
            own = {split for split, _ in task.splits} - {"train"}  # these have files of their own
            drawn = rows(name for name in ORDER if name not in own)
            how = f"at random by {task.group!r}" if task.group else "at random"
            say(f"note: splits were drawn {how}, with seed {seed}: {drawn} rows", error=True)
        return
    columns = " and ".join(repr(name) for name in sorted(task.split_columns))
    verb = "name" if len(task.split_columns) > 1 else "names"
    say(f"note: {columns} of {task.place} {verb} the splits: {rows(ORDER)} rows", error=True)
    if "valid" not in survey.rows:
        say("warning: there is no validation split; train with train.select=last", error=True)


def _say_odd_classes(survey: RowSurvey, labels: list[str]) -> None:
    """Warn of classes that may stand for a missing label, or that are scores."""
    counts = sum(survey.labels.values(), Counter[str]())
    for label in labels:
        if label.lower() in MISSING and not (label.startswith("-") and len(labels) == 2):
            say(
                f"warning: {label!r} is a class, with {counts[label]:,} rows: if it stands for a "
                "missing label, take these rows out",
                error=True,
            )
    numbers = [_number(label) for label in labels]
    if len(labels) > 2 and all(map(math.isfinite, numbers)) and any(x % 1 for x in numbers):
        say(
            f"warning: the {len(labels):,} classes are numbers, such as {labels[0]}; for scores "
            "give --kind score",
            error=True,
        )


def _say_look_alikes(survey: RowSurvey, noun: str) -> None:
    """Warn of classes that look alike, in whatever split. `noun` is what has a class."""
    counts = sum(survey.labels.values(), Counter[str]())
    spellings: dict[str, list[str]] = {}
    for label in sorted(counts):
        spellings.setdefault(_plain(label), []).append(label)
    groups = [same for same in spellings.values() if len(same) > 1]
    named = [
        " and ".join(f"{label!r} ({counts[label]:,} {noun})" for label in same)
        for same in groups[:3]
    ]
    if named:
        more = ", ..." if len(groups) > 3 else ""
        what = "in case, white space, or how their characters are written"
        say(f"warning: some classes differ only {what}: {', '.join(named)}{more}", error=True)


def _plain(label: str) -> str:
    """A label without what the eye may miss: case, invisible characters, how often white space is
    repeated, whether an accent is a character of its own, and a number's ".0"."""
    text = unicodedata.normalize("NFKC", label).casefold()
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return " ".join(text.split()).removesuffix(".0")


def _say_lacking(survey: RowSurvey, labels: list[str], noun: str) -> None:
    """Warn if a split has no rows, or words (`noun`), of some classes."""
    for split, counts in survey.labels.items():
        if lacking := [label for label in labels if label not in counts]:
            named = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
            say(
                f"warning: {split} has no {noun} of {len(lacking):,} of the {len(labels):,} "
                f"classes: {named}",
                error=True,
            )


def _say_unlabelled(task: TaskSource, survey: RowSurvey) -> None:
    """Say which splits have no labels, and warn of validation questions without one. Their rows
    are kept, but not scored."""
    for split in survey.rows:
        if split not in survey.with_labels:
            say(f"note: {split} has no labels; it can be predicted, but not scored", error=True)
    rows, labelled = survey.rows.get("valid", 0), survey.labels.get("valid", Counter()).total()
    if task.kind == "choice" and rows > labelled:
        count = f"{rows - labelled:,} of the {rows:,} questions"
        say(f"warning: {count} of valid have no label and are not scored", error=True)


def say_empty(empty: int, rows: int, first: str) -> None:
    """Warn of rows whose texts are all empty, which are kept. `first` is file and line of one."""
    if empty:
        say(f"warning: no text in {empty:,} of the {rows:,} rows; the first is {first}", error=True)


def _refuse_labels_of_rows(task: TaskSource, survey: RowSurvey) -> None:
    """Raise BadInput if most rows have a label of their own, from which no class can be learnt."""
    counts = sum(survey.labels.values(), Counter[str]())
    alone = sum(count == 1 for count in counts.values())
    if task.kind != "class" or len(counts) < MANY_CLASSES or 2 * alone <= counts.total():
        return
    numbers = all(math.isfinite(_number(label)) for label in counts)
    raise BadInput(
        f"{task.place}: {alone:,} of the {counts.total():,} rows have a label that no other row "
        f"has; {'these are numbers: give --kind score' if numbers else 'name a column of classes'}"
    )


def _draw_splits(task: TaskSource, survey: RowSurvey, stratify: bool) -> list[str]:
    """Draw the split of every row that has none. Rows with equal keys go to the same split.

    The hash of a row's key, or else of its texts, depends on the seed. So sorting the hashes is a
    random permutation fixed by the seed.
    """
    keys, first, key_of_row, sizes = np.unique(
        survey.keys[""], return_index=True, return_inverse=True, return_counts=True
    )
    shares = {"valid": VALID_SHARE} if "test" in survey.rows else SHARES
    names = [*shares, "train"]
    if stratify:
        split_of_key = _stratified(np.asarray(survey.to_draw)[first], sizes, list(shares.values()))
    elif task.group:
        split_of_key = _whole_groups(sizes, list(shares.values()))
    else:
        rows_before = np.cumsum(sizes) - sizes
        bounds = np.cumsum(list(shares.values()))
        split_of_key = np.searchsorted(bounds, rows_before / len(key_of_row), side="right")
    if len(set(split_of_key)) < len(names):
        kind = "group" if task.group else "different example"
        raise BadInput(
            f"{task.place}: {many(len(keys), kind)}, too few to be split "
            f"{'90/10' if 'test' in survey.rows else '90/5/5'}; "
            "give a directory with train, valid and test files"
        )
    return [names[i] for i in split_of_key[key_of_row]]


def _whole_groups(sizes: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """The part to which each key goes, (keys,), given its number of rows `sizes` (keys,).

    Part i gets about shares[i] of the rows, and the last part, which is for training, the rest. A
    key goes to the first part that still lacks at least half as many rows as the key has. So a
    group with more than twice the rows of every share is for training.
    """
    parts = np.full(len(sizes), len(shares))
    lacking = [share * sizes.sum() for share in shares]
    for key, size in enumerate(sizes):
        for i, rows in enumerate(lacking):
            if rows >= size / 2:
                parts[key], lacking[i] = i, rows - size
                break
    return parts


def _stratified(classes: np.ndarray, sizes: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """The part to which each key goes, (keys,).

    Part i gets shares[i] of the rows of every class, and one more part gets the rest. `classes`
    (keys,) is the class of each key, and `sizes` (keys,) its number of rows.

    Fractions of a row are carried over to the next class, so that small classes together fill a
    part. Every class keeps at least one key in the last part, which is for training.
    """
    parts = np.full(len(classes), len(shares))
    owed = np.zeros(len(shares))  # rows that each part has yet to get, fractions included
    by_class = np.argsort(classes, kind="stable")
    class_starts = np.flatnonzero(np.diff(classes[by_class])) + 1
    for keys in np.split(by_class, class_starts):
        place = 0
        for i, share in enumerate(shares):
            owed[i] += share * sizes[keys].sum()
            while place < len(keys) - 1 and owed[i] >= sizes[keys[place]] / 2:
                parts[keys[place]] = i
                owed[i] -= sizes[keys[place]]
                place += 1
    return parts


def _class_names(task: TaskSource, survey: RowSurvey) -> list[str]:
    """The classes, in the order of their ids. Raises BadInput if there are fewer than two."""
    labels = task.labels or sorted(survey.labels.get("train", ()))
    if len(labels) < 2:
        names = f"one class only, {labels[0]}" if labels else "no class"
        raise BadInput(f"{task.place}: the training rows have {names}; give two or more")
    return labels


def _unseen(survey: RowSurvey, labels: list[str], noun: str) -> Counts:
    """Count the rows, or words (`noun`), whose class is not in training, and print them.

    Returns split -> class -> the number of its rows or words. Prints on standard error.
    """
    unseen: Counts = {}
    for split, counts in survey.labels.items():
        if others := {label: n for label, n in sorted(counts.items()) if label not in labels}:
            unseen[split] = others
            named = ", ".join(f"{label!r} {n}" for label, n in list(others.items())[:5])
            more = ", ..." if len(others) > 5 else ""
            say(
                f"warning: {split}: {noun} whose class is not in training count as wrong: "
                f"{named}{more}",
                error=True,
            )
    return unseen


def each_ending(questions: Iterable[Row]) -> Iterator[Row]:
    """Yield a row for each ending of each question: the context, the ending, the question's
    label.
    """
    for row in questions:
        context, *endings = row.texts
        yield from (row._replace(texts=(context, ending)) for ending in endings)


def ending_numbers(choices: int) -> list[str]:
    """The labels that a question with `choices` endings may have."""
    return [str(i) for i in range(choices)]


def row_batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in batches of about BATCH characters."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(map(len, row.texts)) + 64  # also limits the number of empty texts in a batch
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class RowWriter:
    """Encodes rows and appends them to their splits.

    If a split has the columns `input` and `input_b`, they receive the texts themselves.
    """

    def __init__(self, splits: dict[str, SplitWriter], encoder: CachedEncoder, labels: list[str]):
        self.splits, self.encoder = splits, encoder
        self.class_ids = {label: i for i, label in enumerate(labels)}
        self.groups: dict[str, dict[str, int]] = {name: {} for name in splits}
        self.spelled = Spelled(encoder.tokenizer)

    def append(self, batch: list[Row]) -> None:
        """Encode a batch of rows and append each to its split."""
        self.spelled.add(text for row in batch for text in row.texts)
        for name, split in self.splits.items():
            rows = [row for row in batch if row.split == name]
            if not rows:
                continue
            if "labels" in split.offsets:
                self._append_tags(split, rows)
            else:
                for i, tokens in enumerate(("tokens", "tokens_b")):
                    if tokens in split.offsets:
                        texts = [row.texts[i] for row in rows]
                        before = self.encoder.unknown
                        split.append_ragged(tokens, *self.encoder.encode(texts))
                        unknown = self.encoder.unknown - before
                        split.count_characters(sum(map(len, texts)), unknown)
                split.append("label", np.array([self._label(row.label) for row in rows]))
            for i, text in enumerate(("input", "input_b")):
                if text in split.offsets:
                    split.append_texts(text, [row.texts[i] for row in rows])
            if "id" in split.offsets:
                split.append_texts("id", [row.id or "" for row in rows])
            if "group" in split.writers:
                groups = self.groups[name]
                numbers = [groups.setdefault(row.group or "", len(groups)) for row in rows]
                split.append("group", np.array(numbers))

    def _append_tags(self, split: SplitWriter, rows: list[Row]) -> None:
        """Append tokens and their labels. The label of a word stands at its first token."""
        encoded = encode_words(self.encoder.tokenizer, [row.texts[0] for row in rows])
        labels = [np.full(len(ids), IGNORED) for ids, _ in encoded]
        for row, of_tokens, (_, first) in zip(rows, labels, encoded, strict=True):
            names = row.label.split(" ") if row.label else [NO_LABEL] * len(first)
            of_tokens[first] = [
                UNLABELLED if name == NO_LABEL else self._label(name) for name in names
            ]
        lengths = np.array([len(ids) for ids, _ in encoded])
        split.append_ragged("tokens", np.concatenate([ids for ids, _ in encoded]), lengths)
        split.append_ragged("labels", np.concatenate(labels), lengths)

    def _label(self, label: str | None) -> float:
        """A label as a number: the id of its class, or the score itself."""
        if self.class_ids:
            return UNLABELLED if label is None else self.class_ids.get(label, UNSEEN)
        return math.nan if label is None else _number(label)


# -------------------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser, add_own: Callable[..., None]) -> None:
    """Add the options of every task, and with `add_own` those of one task."""
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        metavar="FILE|DIR",
        help="The raw file, or a directory that holds the train, valid (or dev) and test files. A "
        "source without splits is divided 90/5/5 into train, valid and test. A file given together "
        "with --test is divided 90/10 into train and valid.",
    )
    add(
        "--split-column",
        metavar="NAME",
        help="The column that names each row's split: train, valid or test (default: the column "
        "split or set, if there is one). If there is a column validation, rows in which it is true "
        "belong to the split valid. The value `none` ignores all these columns and draws the "
        "splits at random.",
    )
    for split in ("train", "valid", "test"):
        add(
            f"--{split}",
            type=Path,
            nargs="+",
            metavar="FILE",
            help=f"The files of the split {split} (default: those in the directory --input; "
            "without --input there is no such split).",
        )
    add(
        "--tokenizer",
        type=Path,
        metavar="TOK",
        help="The directory of a tokenizer, a store or a checkpoint (default: the alphabet of a "
        "DNA, protein or music task). A task on text needs a tokenizer.",
    )
    add(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="The seed of the random division into train, valid and test, if the source has no "
        "splits (default: %(default)s).",
    )
    add(
        "--stratify",
        action="store_true",
        help="If splits are drawn, divide the rows of every class in the same proportions "
        "(default: draw them regardless of class).",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="Leave out rows that cannot be read, and list and count them (default: stop at the "
        "first).",
    )
    shared = {action.dest for action in parser._actions}
    add_own(parser)
    own = [action.dest for action in parser._actions if action.dest not in shared]
    parser.set_defaults(own=own)
    add_output(parser, "STORE")


def run(
    name: str, read: Callable[[argparse.Namespace], TaskSource], arguments: argparse.Namespace
) -> None:
    """Encode the task `name`, read by `read`, into a store."""
    given = [arguments.train, arguments.valid, arguments.test]
    inputs = [path for paths in given for path in paths or ()]
    inputs += [arguments.input] if arguments.input is not None else []
    check_directory(arguments.output, arguments.overwrite, ("store.json",), *inputs)
    if arguments.input is not None:
        check_exists(arguments.input)
    tokenizer = tokenizers.load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    started = time.monotonic()
    task = read(arguments)
    # `evaluate.py input=` reads rows to predict with the same task and options
    options = {key: getattr(arguments, key) for key in arguments.own if hasattr(arguments, key)}
    # a store without these is the same as in earlier versions
    for key in ("id", "group", *(["labels"] if name == "conll" else [])):
        if options.get(key) is None:
            options.pop(key, None)
    columns = {**task.columns, "task": name, "options": options}
    task = replace(task, columns=columns, group=options.get("group", ""))
    tokenizer = tokenizer or task.tokenizer
    if tokenizer is None:
        raise BadInput("--tokenizer is required for this task: it has no alphabet of its own")
    with task.left_out, task.bad:
        written = write_task(
            task,
            arguments.output,
            tokenizer,
            arguments.seed,
            command_origin(),
            arguments.overwrite,
            arguments.stratify,
        )
    size = sum(path.stat().st_size for path in task.files)
    say_written(arguments.output, written, started, size)
