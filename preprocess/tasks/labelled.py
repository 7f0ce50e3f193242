"""Labelled examples -> a store with a column `label`, or `labels` of tokens: what every task's
reader returns, the checks and the splitting they share.

To add a task: write a module with `add_arguments(parser)` and `read(arguments) -> Task`, and name
it in `preprocess/cli.py`'s table.
"""

from __future__ import annotations

import argparse
import math
import re
import time
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
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.store import UNLABELLED, UNSEEN
from xformer.data.tags import IGNORED, NO_LABEL, encode_words, is_bio
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, origin
from ..arguments import check_output_directory as check_output
from ..arguments import say_written as summarise
from ..arguments import whole_number as number
from ..bad import BadRows
from ..binarize import BATCH, check_files, sources
from ..words import CachedEncoder as Encoder
from .tables import ending, stem

CLASS_METRICS = ("accuracy", "f1", "mcc")
SCORE_METRICS = ("spearman", "pearson")
TAG_METRICS = ("accuracy", "f1", "entity_f1")
ORDER = ("train", "valid", "valid_mismatched", "test", "test_mismatched")
SPLITS = {"train": "train", "valid": "valid", "dev": "valid", "validation": "valid", "test": "test"}
SHARES = {"test": 0.05, "valid": 0.05}  # of a source without splits; the rest is `train`
VALID = 0.1  # of a source whose test rows alone are known, as Min et al. 2019 divide DeepLoc's
MAX_CLASSES = 20_000
LONGEST_TEXT = 2**24  # characters of a row: it is held in memory as a whole, with all its words


class Row(NamedTuple):
    """One example: one text or two, the label as it is written (None: there is none); of a task of
    tags the labels of the text's words, separated by spaces. A question of a task of the kind
    "choice" is a context and all its endings; its label is the number of the right one, from 0."""

    split: str  # "" where the source does not say: it is drawn
    texts: tuple[str, ...]
    label: str | None
    file: Path
    line: int
    id: str | None = None  # the source's own name for it
    group: str | None = None  # rows of a group are judged together, as segments of one piece
    key: str | None = None  # equal keys are never drawn into two splits (None: the texts)


@dataclass(frozen=True)
class Task:
    """What a reader makes of its arguments.

    `rows` reads everything anew each time it is called. `splits` names a file for each split that
    must hold a row. `labels` fixes the classes and their order (None: the sorted names found in
    training). `columns` says which column of the raw file is which, for programs that read such
    files later. `left_out` are rows that the task is defined without. `tokenizer` is used where
    the user gives none. `split_columns` are the columns that named the splits of the rows read so
    far.
    """

    rows: Callable[[], Iterator[Row]]
    files: list[Path]
    kind: str  # "class", "score", "tag" or "choice"
    metric: str | None  # None: by the classes, of tags alone
    columns: dict[str, Any]
    bad: BadRows
    splits: Sequence[tuple[str, Path]] = ()
    left_out: BadRows = field(default_factory=lambda: BadRows(skip=True))
    labels: list[str] | None = None
    tokenizer: Tokenizer | None = None
    pairs: bool = False
    split_columns: set[str] = field(default_factory=set)

    @property
    def noun(self) -> str:
        """What has a label."""
        return "words" if self.kind == "tag" else "rows"

    @property
    def has_classes(self) -> bool:
        """Whether labels are names of classes."""
        return self.kind in ("class", "tag")


@dataclass
class Survey:
    """What one pass over the rows finds: rows and labels by split, the keys of the texts in order,
    whether ids and groups are given, how many endings a question has. Memory grows by 8 bytes a
    row, 16 where splits are drawn."""

    rows: dict[str, int] = field(default_factory=dict)
    labels: dict[str, Counter[str]] = field(default_factory=dict)  # split -> class -> how many
    classes: set[str] = field(default_factory=set)
    keys: dict[str, array[int]] = field(default_factory=dict)
    to_draw: array[int] = field(default_factory=lambda: array("L"))  # classes of rows without split
    ids: bool = False
    groups: bool = False
    choices: int = 1


def check_metric(kind: str, metric: str | None) -> str:
    """The metric to report, by default accuracy or spearman. Raises BadInput on a wrong one."""
    allowed = {"class": CLASS_METRICS, "score": SCORE_METRICS, "tag": TAG_METRICS}[kind]
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
    stratify: bool = False,
) -> dict[str, dict[str, Any]]:
    """Check every row, then encode and write them all. Returns rows and tokens of every split.

    A source without splits is divided 90/5/5 by `seed`, one whose test rows alone are known 90/10,
    and with `stratify` every class is; equal texts, and rows of one group, stay together. Published
    splits stay as they are: texts in two of them are counted, in the origin and on standard error.
    The label column is int64 (a class id; UNLABELLED where a row has none, UNSEEN where its class
    is in no row of training) or float32 (NaN where none); the column of tags is int16, ragged like
    the tokens (IGNORED where no word begins).
    Raises BadInput naming file and line of a label or score that cannot be.
    """
    survey = _survey(task, seed)
    if stratify and (task.kind != "class" or "" not in survey.rows):
        why = "the task has no classes" if task.kind != "class" else "the source names its splits"
        raise BadInput(f"--stratify draws the classes of rows in proportion, but {why}")
    drawn = _draw_splits(task, survey, stratify) if "" in survey.rows else None
    if drawn is not None:
        origin = {**origin, "seed": seed} | ({"stratified": True} if stratify else {})
        survey = _survey(task, seed, drawn)
    _say_splits(task, survey)
    if "train" not in survey.rows:
        raise BadInput(f"{task.files[0]} holds no row for training")
    twice = _twice(survey)
    labels = _class_names(task, survey) if task.has_classes else []
    unseen = _unseen(survey, labels, task.noun) if task.has_classes else {}
    _say_lacking(survey, labels, task.noun)
    _say_unlabelled(task, survey)
    names: list[str] = [name for name in ORDER if name in survey.rows]
    columns, ragged = _store_columns(task, survey)
    with create_store(output, tokenizer, columns, ragged, overwrite) as store:
        with ExitStack() as stack:
            splits = {name: stack.enter_context(store.split(name)) for name in names}
            rows, classes = _rows(task, drawn), labels
            if task.kind == "choice":
                rows, classes = each_ending(rows), ending_numbers(survey.choices)
            writer = Writer(splits, Encoder(tokenizer), classes)
            total = sum(survey.rows.values()) * survey.choices
            with Progress("encoding", total, "rows") as shown:
                for batch in batches(rows):
                    writer.append(batch)
                    shown.advance(len(batch))
        origin = {**origin, "sources": sources(task.files), "columns": task.columns}
        origin |= task.bad.as_origin() | ({"unseen": unseen} if unseen else {})
        origin |= {"left_out_rows": task.left_out.count} if task.left_out.count else {}
        origin |= {"in_two_splits": twice} if twice else {}
        origin |= {"split_columns": sorted(task.split_columns)} if task.split_columns else {}
        # splits close in reverse; the store lists them in their usual order
        store.splits = {name: store.splits[name] for name in names}
        metric = task.metric or ("entity_f1" if is_bio(labels) else "accuracy")
        store.finish(task.kind, labels, metric, origin, survey.choices)
        return store.splits


def _store_columns(task: Task, survey: Survey) -> tuple[dict[str, str], list[str]]:
    """The type of every column of the store, and the names of the ragged ones."""
    texts = ["tokens", "tokens_b"] if task.pairs else ["tokens"]
    label = {"score": {"label": "float32"}, "tag": {"labels": "int16"}}
    columns = {**dict.fromkeys(texts, ""), **label.get(task.kind, {"label": "int64"})}
    columns |= {"id": "uint8"} if survey.ids else {}
    columns |= {"group": "int64"} if survey.groups else {}
    return columns, [name for name in columns if name in (*texts, "id", "labels")]


def _rows(task: Task, drawn: Sequence[str] | None) -> Iterator[Row]:
    """The rows that can be used, each with its split."""
    splits = iter(drawn) if drawn is not None else None
    ids: set[bytes] = set()
    for row in task.rows():
        reason = _wrong(task, row)
        if reason is None and row.id is not None:
            name = blake2b(f"{row.split}\0{row.id}".encode(), digest_size=16).digest()
            reason = f"an earlier row has the id {row.id!r} too" if name in ids else None
            ids.add(name)
        if reason is not None:
            task.bad(row.file, row.line, reason)
        else:
            yield row if splits is None or row.split else row._replace(split=next(splits))


def _wrong(task: Task, row: Row) -> str | None:
    size = sum(map(len, row.texts))
    if size > LONGEST_TEXT:
        return f"a text of {size:,} characters; a row may hold {LONGEST_TEXT:,}"
    if row.label is None:
        hidden = row.split.startswith("test") or (task.kind == "choice" and row.split == "valid")
        return None if hidden else "the label is empty"
    if task.kind == "score":
        fine = math.isfinite(_number(row.label))
        return None if fine else f"the score {row.label!r} is not a number"
    for label in _classes(task, row.label):
        if task.labels and label not in task.labels:
            return f"label {label!r} is none of {', '.join(task.labels)}"
    return None


def _classes(task: Task, label: str) -> list[str]:
    """The classes in a row's label."""
    if task.kind != "tag":
        return [label]
    return [name for name in label.split(" ") if name != NO_LABEL]


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan


def _survey(task: Task, seed: int, drawn: Sequence[str] | None = None) -> Survey:
    survey = Survey()
    salt = seed.to_bytes(8, "little", signed=True)
    numbers: dict[str, int] = {}
    for row in _rows(task, drawn):
        if not row.split and task.kind == "class":
            survey.to_draw.append(numbers.setdefault(row.label or "", len(numbers)))
        survey.rows[row.split] = survey.rows.get(row.split, 0) + 1
        if task.kind != "score" and row.label is not None:
            found = _classes(task, row.label)
            survey.labels.setdefault(row.split, Counter()).update(found)
            survey.classes.update(found)
            if len(survey.classes) > MAX_CLASSES:
                raise BadInput(
                    f"{row.file}: the label column holds more than {MAX_CLASSES} classes; "
                    "are these numbers (--kind score)?"
                )
        survey.ids |= row.id is not None
        survey.groups |= row.group is not None
        if task.kind == "choice":  # the reader gives all questions as many endings
            survey.choices = len(row.texts) - 1
        text = row.key or "\0".join(text.strip() for text in row.texts)
        key = blake2b(text.encode(), digest_size=8, salt=salt).digest()
        survey.keys.setdefault(row.split, array("Q")).append(int.from_bytes(key, "little"))
    for split, path in task.splits:
        if split and split not in survey.rows:
            raise BadInput(f"{path} holds no example, so the split {split} would be empty")
    if not survey.rows:
        task.bad.report()
        raise BadInput(f"{task.files[0]} holds no example that can be used")
    return survey


def _twice(survey: Survey) -> dict[str, dict[str, int]]:
    """split -> earlier split -> rows whose text stands in both; says so on standard error."""
    found: dict[str, dict[str, int]] = {}
    names = [name for name in ORDER if name in survey.keys]
    for i, name in enumerate(names):
        keys = np.asarray(survey.keys[name])
        for other in names[:i]:
            if number := int(np.isin(keys, np.asarray(survey.keys[other])).sum()):
                found.setdefault(name, {})[other] = number
    parts = [
        f"{number:,} of the {survey.rows[name]:,} rows of {name} are in {other}"
        for name, others in found.items()
        for other, number in others.items()
    ]
    if parts:
        say(f"note: word for word, {'; '.join(parts)} too; they are kept", error=True)
    return found


def _say_splits(task: Task, survey: Survey) -> None:
    """Say which columns named the splits, and what came out."""
    if not task.split_columns:
        return
    columns = " and ".join(repr(name) for name in sorted(task.split_columns))
    rows = ", ".join(f"{name} {survey.rows[name]:,}" for name in ORDER if name in survey.rows)
    verb = "name" if len(task.split_columns) > 1 else "names"
    say(f"note: {columns} of {task.files[0]} {verb} the splits: {rows} rows", error=True)
    if "valid" not in survey.rows:
        say("warning: no row is for validation: train with train.select=last", error=True)


def _say_lacking(survey: Survey, labels: list[str], what: str) -> None:
    """Warn of classes that a split with labels has no row, or word (`what`), of."""
    for split, counts in survey.labels.items():
        if lacking := [label for label in labels if label not in counts]:
            named = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
            say(
                f"warning: {split} has no {what} of {len(lacking):,} of the {len(labels):,} "
                f"classes: {named}",
                error=True,
            )


def _say_unlabelled(task: Task, survey: Survey) -> None:
    """Warn of questions to validate on that have no label: they are read, and not scored."""
    rows, labelled = survey.rows.get("valid", 0), survey.labels.get("valid", Counter()).total()
    if task.kind == "choice" and rows > labelled:
        number = f"{rows - labelled:,} of the {rows:,} questions"
        say(f"warning: {number} of valid have no label and are not scored", error=True)


def _draw_splits(task: Task, survey: Survey, stratify: bool) -> list[str]:
    """The split of every row without one. Equal texts have one key, and a key lies in one split.

    The keys are hashes of (seed, text), so their sorted order is the seed's own permutation.
    """
    keys, first, group, sizes = np.unique(
        survey.keys[""], return_index=True, return_inverse=True, return_counts=True
    )
    shares = {"valid": VALID} if "test" in survey.rows else SHARES
    names = [*shares, "train"]
    if stratify:
        of_key = _stratified(np.asarray(survey.to_draw)[first], sizes, list(shares.values()))
    else:
        start = (np.cumsum(sizes) - sizes) / len(group)  # where a group begins, as a share of all
        of_key = np.searchsorted(np.cumsum(list(shares.values())), start, side="right")
    if len(set(of_key)) < len(names):
        raise BadInput(
            f"{task.files[0]} holds {len(keys)} different examples, too few to be split "
            f"{'90/10' if 'test' in survey.rows else '90/5/5'}; "
            "give a directory with train, valid and test files"
        )
    return [names[i] for i in of_key[group]]


def _stratified(classes: np.ndarray, sizes: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """The part of each key, (keys,): part i takes shares[i] of the rows of every class, and the
    part after the last takes the rest. `classes` and `sizes` (keys,): its class, how many rows.

    Shares of a row are carried over to the next class, so that small classes count together. Every
    class keeps at least one key in the last part, which is for training.
    """
    parts = np.full(len(classes), len(shares))
    owed = np.zeros(len(shares))
    for keys in np.split(
        np.argsort(classes, kind="stable"), np.flatnonzero(np.diff(np.sort(classes))) + 1
    ):
        place = 0
        for i, share in enumerate(shares):
            owed[i] += share * sizes[keys].sum()
            while place < len(keys) - 1 and owed[i] >= sizes[keys[place]] / 2:
                parts[keys[place]] = i
                owed[i] -= sizes[keys[place]]
                place += 1
    return parts


def _class_names(task: Task, survey: Survey) -> list[str]:
    labels = task.labels or sorted(survey.labels.get("train", ()))
    if len(labels) < 2:
        raise BadInput(f"{task.files[0]}: there is one class only, {', '.join(labels)}")
    return labels


def _unseen(survey: Survey, labels: list[str], what: str) -> dict[str, dict[str, int]]:
    """split -> class -> rows, or words (`what`), of the classes that training has not; says so on
    standard error."""
    found: dict[str, dict[str, int]] = {}
    for split, counts in survey.labels.items():
        if unseen := {label: n for label, n in sorted(counts.items()) if label not in labels}:
            found[split] = unseen
            named = ", ".join(f"{label!r} {n}" for label, n in list(unseen.items())[:5])
            more = ", ..." if len(unseen) > 5 else ""
            say(
                f"warning: {split}: {what} of classes that training has not count as wrong: "
                f"{named}{more}",
                error=True,
            )
    return found


def each_ending(questions: Iterable[Row]) -> Iterator[Row]:
    """A row for each ending of each question: the context, the ending, the question's label."""
    for row in questions:
        context, *endings = row.texts
        yield from (row._replace(texts=(context, ending)) for ending in endings)


def ending_numbers(choices: int) -> list[str]:
    """The labels that a question with so many endings may have."""
    return [str(i) for i in range(choices)]


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
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


class Writer:
    """Appends rows to their splits; the columns `input` and `input_b` get the texts themselves."""

    def __init__(self, splits: dict[str, SplitWriter], encoder: Encoder, labels: list[str]):
        self.splits, self.encoder = splits, encoder
        self.class_ids = {label: i for i, label in enumerate(labels)}
        self.groups: dict[str, dict[str, int]] = {name: {} for name in splits}

    def append(self, batch: list[Row]) -> None:
        for name, split in self.splits.items():
            rows = [row for row in batch if row.split == name]
            if not rows:
                continue
            if "labels" in split.offsets:
                self._append_tags(split, rows)
            else:
                for i, column in enumerate(c for c in ("tokens", "tokens_b") if c in split.offsets):
                    texts = [row.texts[i] for row in rows]
                    split.append_ragged(column, *self.encoder.encode(texts))
                split.append("label", np.array([self._label(row.label) for row in rows]))
            for i, shown in enumerate(("input", "input_b")):
                if shown in split.offsets:
                    split.append_texts(shown, [row.texts[i] for row in rows])
            if "id" in split.offsets:
                split.append_texts("id", [row.id or "" for row in rows])
            if "group" in split.writers:
                groups = self.groups[name]
                numbers = [groups.setdefault(row.group or "", len(groups)) for row in rows]
                split.append("group", np.array(numbers))

    def _append_tags(self, split: SplitWriter, rows: list[Row]) -> None:
        """Tokens and their labels: a word's stands at its first token."""
        encoded = encode_words(self.encoder.tokenizer, [row.texts[0] for row in rows])
        labels = [np.full(len(ids), IGNORED) for ids, _ in encoded]
        for row, found, (_, first) in zip(rows, labels, encoded, strict=True):
            names = row.label.split(" ") if row.label else [NO_LABEL] * len(first)
            found[first] = [UNLABELLED if name == NO_LABEL else self._label(name) for name in names]
        lengths = np.array([len(ids) for ids, _ in encoded])
        split.append_ragged("tokens", np.concatenate([ids for ids, _ in encoded]), lengths)
        split.append_ragged("labels", np.concatenate(labels), lengths)

    def _label(self, label: str | None) -> float:
        if self.class_ids:
            return UNLABELLED if label is None else self.class_ids.get(label, UNSEEN)
        return math.nan if label is None else _number(label)


# -------------------------------------------------------------------------------- the files


def input_files(arguments: argparse.Namespace, endings: Sequence[str]) -> dict[str, list[Path]]:
    """split -> files, from --input (a directory, or one file, whose split is "") and from --train,
    --valid and --test, which go before what the directory holds. Beside a file there may be a
    --test: then the file is divided into train and valid.

    Raises BadInput where a file is missing or empty, or there is none for training.
    """
    source: Path | None = arguments.input
    given = {name: getattr(arguments, name) for name in ("train", "valid", "test")}
    given = {name: paths for name, paths in given.items() if paths}
    if source is None and "train" not in given:
        raise BadInput("give --input FILE|DIR, or --train FILE")
    if source is None:
        files = given
    elif source.is_dir():
        files = find_splits(source, endings) | given
        if "train" not in files:
            raise BadInput(f"{source} holds no training file (train{', train'.join(endings)})")
    elif other := next((name for name in given if name != "test"), ""):
        raise BadInput(f"--{other} goes with a directory; {source} is a file")
    else:
        files = {"": [source]} | given
    for paths in files.values():
        check_files(paths)
    return {name: files[name] for name in ("", "train", "valid", "test") if name in files}


def find_splits(
    directory: Path, endings: Sequence[str], names: dict[str, str] = SPLITS
) -> dict[str, list[Path]]:
    """split -> files of a directory: `train.tsv`, `dev.tsv`, else names that end so or are parts of
    a whole, as `sts-train.csv` or `validation-00000-of-00001.parquet`. `names` says which split a
    name stands for. Hidden files are passed over.

    Raises BadInput where two files could be the same split, a part is missing, or the files have
    several endings.
    """
    words = "|".join(names)
    if not directory.is_dir():
        raise BadInput(f"{directory} is no directory")
    files = [
        p
        for p in sorted(directory.iterdir())
        if p.is_file() and ending(p) in endings and not p.name.startswith(".")
    ]
    for pattern in (rf"({words})", rf"(?:.*[-_.])?({words})(?:-\d+-of-(\d+)(?:-[0-9a-f]+)?)?"):
        found: dict[str, list[Path]] = {}
        parts: dict[str, int] = {}  # split -> files it should have
        for path in files:
            match = re.fullmatch(pattern, stem(path), re.IGNORECASE)
            if match is None:
                continue
            split = names[match[1].lower()]
            number = int(match[2]) if match.lastindex == 2 else 0
            others = found.setdefault(split, [])
            if others and not (number and number == parts[split]):
                raise BadInput(
                    f"{directory} holds both {others[0].name} and {path.name}: which is {split}?"
                )
            parts[split] = number
            others.append(path)
        if "train" in found:
            break
        found = {}
    for split, paths in found.items():
        if parts[split] not in (0, len(paths)):
            raise BadInput(f"{directory} holds {len(paths)} of the {parts[split]} files of {split}")
    every = [path for paths in found.values() for path in paths]
    if len({ending(path) for path in every}) > 1:
        raise BadInput(
            f"{directory} holds files of several endings: {', '.join(path.name for path in every)}"
        )
    return found


# -------------------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser, add_own: Callable[..., None]) -> None:
    """The options of every task, with `add_own` for those of its own."""
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        metavar="FILE|DIR",
        help="The raw file, or a directory that holds "
        "the train, valid (or dev) and test files. A source without splits is divided 90/5/5 into "
        "train, valid and test; a file beside --test is divided 90/10 into train and valid.",
    )
    add(
        "--split-column",
        metavar="NAME",
        help="The column that names each row's split: train, "
        "valid or test. Give none to draw the splits although there is such a column (default: "
        "split or set, and validation, which marks rows with true).",
    )
    for split in ("train", "valid", "test"):
        add(
            f"--{split}",
            type=Path,
            nargs="+",
            metavar="FILE",
            help=f"The files of the split "
            f"{split} (default: what the directory --input holds; without --input there is no such "
            "split).",
        )
    add(
        "--tokenizer",
        type=Path,
        metavar="TOK",
        help="The directory of a tokenizer, a store or a "
        "checkpoint (default: the alphabet of the task, if it has one).",
    )
    add(
        "--seed",
        type=number(0),
        default=0,
        metavar="N",
        help="Decides which rows become train, valid and test where the source does not say "
        "(default: %(default)s).",
    )
    add(
        "--stratify",
        action="store_true",
        help="Draw the splits so that each has every class in "
        "proportion (default: draw them without regard to classes).",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="Leave out rows that cannot be read, list and "
        "count them (default: the first one ends the command).",
    )
    shared = {action.dest for action in parser._actions}
    add_own(parser)
    own = [action.dest for action in parser._actions if action.dest not in shared]
    parser.set_defaults(own=own)
    add_output(parser, "STORE")


def run(
    name: str, read: Callable[[argparse.Namespace], Task], arguments: argparse.Namespace
) -> None:
    """Encode the labelled task `name` into a store."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    if arguments.input is not None and not arguments.input.exists():
        raise BadInput(f"{arguments.input} does not exist")
    tokenizer = tokenizers.load(arguments.tokenizer) if arguments.tokenizer else None
    started = time.monotonic()
    task = read(arguments)
    # `evaluate.py input=` reads the rows to predict by the same task and options
    options = {key: getattr(arguments, key) for key in arguments.own}
    task = replace(task, columns={**task.columns, "task": name, "options": options})
    tokenizer = tokenizer or task.tokenizer
    if tokenizer is None:
        raise BadInput("--tokenizer is required for this task: it has no alphabet of its own")
    written = write_task(
        task,
        arguments.output,
        tokenizer,
        arguments.seed,
        origin(),
        arguments.overwrite,
        arguments.stratify,
    )
    task.bad.report()
    task.left_out.report()
    size = sum(path.stat().st_size for path in task.files)
    summarise(arguments.output, written, started, size)
