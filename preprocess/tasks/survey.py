"""One pass over the rows of a task: which of them can be used, and what they hold."""

from __future__ import annotations

import math
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from xformer.data.errors import BadInput
from xformer.data.store import NO_LABEL

from .source import Row, TaskSource

MAX_CLASSES = 20_000
MANY_CLASSES = 50  # so many labels should occur more than once
LARGEST_SCORE = float(np.finfo(np.float32).max)
LONGEST_TEXT = 2**24  # characters in one row, which is held in memory as a whole


@dataclass
class RowSurvey:
    """The result of one pass over the rows.

    It takes 8 bytes of memory per row, 8 more if splits of a task with classes are drawn, 16 more
    if those of pairs are, and 8 more with --group. `usable_rows` takes more if rows have ids: a
    hash of each, in a set.
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


def survey_rows(task: TaskSource, seed: int, drawn: Sequence[str] | None = None) -> RowSurvey:
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

    for row in usable_rows(task, drawn):
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


def usable_rows(task: TaskSource, drawn: Sequence[str] | None) -> Iterator[Row]:
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
        if abs(number(row.label)) <= LARGEST_SCORE:  # false for NaN too
            return None
        if "," in row.label and not math.isnan(number(row.label.replace(",", ".", 1))):
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


def number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan


def refuse_labels_of_rows(task: TaskSource, survey: RowSurvey) -> None:
    """Raise BadInput if most rows have a label of their own, from which no class can be learnt."""
    counts = sum(survey.labels.values(), Counter[str]())
    alone = sum(count == 1 for count in counts.values())
    if task.kind != "class" or len(counts) < MANY_CLASSES or 2 * alone <= counts.total():
        return
    numbers = all(math.isfinite(number(label)) for label in counts)
    raise BadInput(
        f"{task.place}: {alone:,} of the {counts.total():,} rows have a label that no other row "
        f"has; {'these are numbers: give --kind score' if numbers else 'name a column of classes'}"
    )


def class_names(task: TaskSource, survey: RowSurvey) -> list[str]:
    """The classes, in the order of their ids. Raises BadInput if there are fewer than two."""
    labels = task.labels or sorted(survey.labels.get("train", ()))
    if len(labels) < 2:
        names = f"one class only, {labels[0]}" if labels else "no class"
        raise BadInput(f"{task.place}: the training rows have {names}; give two or more")
    return labels
