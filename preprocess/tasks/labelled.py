"""Labelled examples -> a store for fine-tuning.

The reader of each data set returns a `TaskSource` (`source`). All rows are read and checked once
(`survey`), then splits are drawn if the source names none (`drawing`), what is unusual is said
(`remarks`), and the rows are read again, encoded and written here. The column `label` has one
value per row; `labels` has one per token.

To add a task, write a module with `add_arguments(parser)` and `read(arguments) -> TaskSource`, and
add it to the table `TASK_READERS` in `preprocess/cli.py`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import tokenizers
from xformer.data.arguments import whole_number
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.outputs import check_directory
from xformer.data.spelled import Spelled
from xformer.data.store import IGNORED, NO_LABEL, ORDER, UNLABELLED, UNSEEN, marks_entities
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, command_origin, say_written
from ..binarize import BATCH, check_exists, sources
from ..words import CachedEncoder
from .drawing import draw_splits
from .first_tokens import encode_words
from .remarks import Unusual, say_splits, say_unusual
from .source import Row, TaskSource
from .survey import class_names, number, refuse_labels_of_rows, survey_rows, usable_rows


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
    survey = survey_rows(task, seed)
    refuse_labels_of_rows(task, survey)
    if stratify and (task.kind != "class" or "" not in survey.rows):
        why = "the task has no classes" if task.kind != "class" else "the source names its splits"
        raise BadInput(f"--stratify divides the rows of each class, but {why}; leave it out")
    if stratify and task.group:
        raise BadInput(
            "--stratify divides the rows of each class, but --group keeps rows together; leave one "
            "of them out"
        )
    drawn = draw_splits(task, survey, stratify) if "" in survey.rows else None
    if drawn is not None:
        origin = {**origin, "seed": seed} | ({"stratified": True} if stratify else {})
        survey = survey_rows(task, seed, drawn)
    say_splits(task, survey, seed if drawn is not None else None)
    if "train" not in survey.rows:
        raise BadInput(f"{task.place}: no row is for training")
    labels = class_names(task, survey) if task.has_classes else []
    unusual = say_unusual(task, survey, labels, drawn is not None)
    names: list[str] = [name for name in ORDER if name in survey.rows]
    columns, ragged = store_columns(task.kind, task.pairs, survey.ids, survey.groups)
    with create_store(output, tokenizer, columns, ragged, overwrite) as store:
        with ExitStack() as stack:
            splits = {name: stack.enter_context(store.split(name)) for name in names}
            rows, classes = usable_rows(task, drawn), labels
            if task.kind == "choice":
                rows, classes = each_ending(rows), ending_numbers(survey.choices)
            writer = RowWriter(splits, CachedEncoder(tokenizer), classes)
            total = sum(survey.rows.values()) * survey.choices
            with Progress("encoding", total, "rows") as progress:
                for batch in row_batches(rows):
                    writer.append(batch)
                    progress.advance(len(batch))
        origin = {**origin, **_task_origin(task, unusual)}
        say(*filter(None, [writer.spelled.note()]), error=True)
        # the stack closes the splits last to first; list them in their usual order
        store.splits = {name: store.splits[name] for name in names}
        metric = task.metric or ("entity_f1" if marks_entities(labels) else "accuracy")
        store.finish(task.kind, labels, metric, origin, survey.choices)
        return store.splits


def _task_origin(task: TaskSource, unusual: Unusual) -> dict[str, Any]:
    """What the store's origin records about the task: its files and columns, and anything
    unusual.
    """
    record = {"sources": sources(task.files), "columns": task.columns, **task.bad.as_origin()}
    # the key of a store depends on this order
    more = {
        "unseen": unusual.unseen,
        "left_out_rows": task.left_out.count,
        "in_two_splits": unusual.in_two_splits,
        "groups_in_two_splits": unusual.groups_in_two_splits,
        "split_columns": sorted(task.split_columns),
    }
    return record | {key: value for key, value in more.items() if value}


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
        return math.nan if label is None else number(label)


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
