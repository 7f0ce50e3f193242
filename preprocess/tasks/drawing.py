"""Drawing the splits of rows whose source names none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xformer.data.display import many
from xformer.data.errors import BadInput

from .source import TaskSource
from .survey import RowSurvey

# The shares of the rows if the source has no splits; the rest is train.
SHARES = {"test": 0.05, "valid": 0.05}
# The share if the source marks only its test rows. Min et al. 2019 divide DeepLoc in this way.
VALID_SHARE = 0.1


def draw_splits(task: TaskSource, survey: RowSurvey, stratify: bool) -> list[str]:
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
