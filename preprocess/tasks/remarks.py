"""What is unusual about the rows of a task, in notes and warnings on standard error."""

from __future__ import annotations

import math
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from xformer.data.display import say
from xformer.data.store import ORDER

from .source import TaskSource
from .survey import RowSurvey, number

SHARED = 0.1  # a share of rows that share a text with train, above which it is told
# what programs write for a missing value; of two classes, - and -1 are likely to be the other one
MISSING = ("na", "nan", "n/a", "<na>", "null", "-", "?", "-1", "-1.0")

Counts = dict[str, dict[str, int]]  # split -> a name -> how many rows


def say_splits(task: TaskSource, survey: RowSurvey, seed: int | None) -> None:
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


class Unusual(NamedTuple):
    """What the origin of a store records of unusual rows."""

    unseen: Counts  # words or rows of a class that is not in training, by split
    in_two_splits: Counts  # rows whose text is in an earlier split, by split
    groups_in_two_splits: Counts  # ... whose group is


def say_unusual(task: TaskSource, survey: RowSurvey, labels: list[str], drawn: bool) -> Unusual:
    """Say what is unusual about the rows, and return what is recorded of it. `labels` are the
    classes, and `drawn` says whether the splits were drawn."""
    in_two_splits = _in_two_splits(survey.rows, survey.texts or survey.keys, "texts")
    groups_in_two = _in_two_splits(survey.rows, survey.keys, "groups") if task.group else {}
    if drawn and not task.group:
        _say_shared(survey)
    unseen = _unseen(survey, labels, task.noun) if task.has_classes else {}
    if task.kind == "class" and not task.labels:
        _say_odd_classes(survey, labels)
    if task.has_classes and not task.labels:
        _say_look_alikes(survey, task.noun)
    _say_lacking(survey, labels, task.noun)
    _say_unlabelled(task, survey)
    say_empty(survey.empty, sum(survey.rows.values()), survey.first_empty)
    return Unusual(unseen, in_two_splits, groups_in_two)


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
    numbers = [number(label) for label in labels]
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
